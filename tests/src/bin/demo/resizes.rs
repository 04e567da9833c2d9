//! Resizing each model by hand while it serves, as an operator would: with `shadowslice resize`.

use std::time::Duration;

use futures_util::future::join_all;
use shadowslice_tests::server::ServerUnderTest;
use shadowslice_tests::status::HandoverJson;
use tokio::time::{Instant, sleep_until, timeout};

use crate::report;
use crate::workload::Workload;

/// From one resize of a model to the next.
const EVERY: Duration = Duration::from_secs(4);

/// The first resize comes this long after the start of the load.
const FIRST: Duration = Duration::from_secs(1);

/// The first resizes of the models follow each other at this distance, so that they overlap.
const APART: Duration = Duration::from_millis(700);

/// No resize starts later than this before the end of the load, so that the new share serves.
const REST: Duration = Duration::from_secs(2);

/// How long to wait for the first batch at a new share.
const EFFECT_WITHIN: Duration = Duration::from_secs(5);

/// The outcomes of one model's resizes.
#[derive(Debug, Default)]
pub(crate) struct Resizes {
    /// The resizes that were carried out.
    pub(crate) completed: Vec<HandoverJson>,
    /// The number of resizes that were not carried out.
    pub(crate) failed: u64,
}

/// Resizes all models until the load ends; the answers are in the models' order.
pub(crate) async fn all(
    server: &ServerUnderTest,
    workloads: &[Workload],
    start: Instant,
    span: Duration,
) -> Vec<Resizes> {
    let end = start + span - REST;
    let one = |(n, workload)| one_model(server, workload, start, start + FIRST + APART * n, end);
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
        due = (due + EVERY).max(Instant::now());
    }
    resizes
}

/// Adds the time to effect where `resize` answered before a batch had completed at the new share.
async fn with_effect(server: &ServerUnderTest, model: &str, handover: HandoverJson) -> HandoverJson {
    if handover.effect_ms.is_some() {
        return handover;
    }
    let seen = |last: &HandoverJson| last.to_sms == handover.to_sms && last.effect_ms.is_some();
    let effect = server.wait_status(model, "a batch at the new share", |model| {
        model.handovers.last.as_ref().is_some_and(seen)
    });
    match timeout(EFFECT_WITHIN, effect).await {
        Ok(Ok(model)) => {
            let effect_ms = model.handovers.last.and_then(|last| last.effect_ms);
            HandoverJson { effect_ms, ..handover }
        }
        _ => handover,
    }
}
