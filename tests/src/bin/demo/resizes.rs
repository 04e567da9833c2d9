//! Resizes of each model under load with `shadowslice resize`, as an operator would run it.

use std::time::Duration;

use futures_util::future::join_all;
use shadowslice_tests::server::ServerUnderTest;
use shadowslice_tests::status::HandoverJson;
use tokio::time::{Instant, sleep_until, timeout};

use crate::report;
use crate::workload::Workload;

/// The interval between two resizes of a model.
const RESIZE_INTERVAL: Duration = Duration::from_secs(4);

/// The time from the start of the load to the first resize.
const FIRST_DELAY: Duration = Duration::from_secs(1);

/// The interval between the first resizes of two models, which is short enough for the resizes to
/// overlap.
const STAGGER: Duration = Duration::from_millis(700);

/// The time before the end of the load in which no resize starts, so that the last resizes can take
/// effect.
const FINAL_PAUSE: Duration = Duration::from_secs(2);

/// The time limit for the first batch at the new share.
const EFFECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The resizes of one model.
#[derive(Debug, Default)]
pub(crate) struct Resizes {
    pub(crate) completed: Vec<HandoverJson>,
    pub(crate) failed: u64,
}

/// Resizes all models until the load ends. Returns the resizes in the order of the models.
pub(crate) async fn all(
    server: &ServerUnderTest,
    workloads: &[Workload],
    start: Instant,
    span: Duration,
) -> Vec<Resizes> {
    let end = start + span - FINAL_PAUSE;
    let one = |(n, workload)| one_model(server, workload, start, start + FIRST_DELAY + STAGGER * n, end);
    join_all((0..).zip(workloads).map(one)).await
}

async fn one_model(
    server: &ServerUnderTest,
    workload: &Workload,
    start: Instant,
    first: Instant,
    end: Instant,
) -> Resizes {
    let mut resizes = Resizes::default();
    let mut due = first;
    for share in workload.shares.iter().cycle() {
        if due > end {
            break;
        }
        sleep_until(due).await;
        match server.resize(workload.name, *share).await {
            Ok(handover) => {
                let handover = with_effect(server, workload.name, handover).await;
                report::resized(start.elapsed(), workload.name, &handover);
                resizes.completed.push(handover);
            }
            Err(error) => {
                report::not_resized(start.elapsed(), workload.name, &error);
                resizes.failed += 1;
            }
        }
        due = (due + RESIZE_INTERVAL).max(Instant::now());
    }
    resizes
}

/// Adds the effect time to the result, if `resize` returned before the first batch at the new share
/// completed.
async fn with_effect(server: &ServerUnderTest, model: &str, handover: HandoverJson) -> HandoverJson {
    if handover.effect_ms.is_some() {
        return handover;
    }
    let seen = |last: &HandoverJson| last.to_sms == handover.to_sms && last.effect_ms.is_some();
    let effect = server.wait_status(model, "a batch at the new share", |model| {
        model.handovers.last.as_ref().is_some_and(seen)
    });
    match timeout(EFFECT_TIMEOUT, effect).await {
        Ok(Ok(model)) => {
            let effect_ms = model.handovers.last.and_then(|last| last.effect_ms);
            HandoverJson { effect_ms, ..handover }
        }
        _ => handover,
    }
}
