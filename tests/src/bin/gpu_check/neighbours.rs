//! The stage `neighbours`, which measures how much the incumbent and other models slow down while a
//! shadow warms up. It compares the latencies of requests that overlap a hand-over with the
//! latencies under the same load without hand-overs.

use std::time::Duration;

use serde_json::{Map, json};
use tokio::time::{Instant, sleep};

use crate::error::StageError;
use crate::figures::FigureStore;
use crate::lossless::{ModelLoads, finish_all};
use crate::numbers::{quantile, rounded};
use crate::serving::{RunningServer, ServingOptions};
use crate::tools::CheckSettings;
use crate::traffic::{LoadResult, TrafficTimes};

/// The number of hand-overs of each model.
const HANDOVERS: usize = 5;

/// The shares between which hand-overs alternate, in percent.
const SHARES: [u32; 2] = [45, 30];

/// The time for which the load runs before the first hand-over.
const CALM: Duration = Duration::from_secs(20);

/// The minimum number of requests for which a p99 is computed.
const MIN_REQUESTS: usize = 100;

/// The start and the end of a period.
pub(crate) type TimeWindow = (Instant, Instant);

pub(crate) async fn run(settings: &CheckSettings, figures: &mut FigureStore) -> Result<(), StageError> {
    let service = ServingOptions {
        name: "neighbours",
        models: &settings.models,
        share: SHARES[1],
        batch: 8,
        handover: "shadow",
    };
    let serving = RunningServer::start(settings, service).await?;
    let loads = ModelLoads::half(&serving, &settings.names()).await?;
    let running = loads.start(None);
    let begun = Instant::now();
    // The period without hand-overs has a fixed length.
    sleep(if settings.quick { CALM / 4 } else { CALM }).await;
    let calm = (begun, Instant::now());
    let mut warming = Vec::new();
    for subject in &loads.subjects {
        let mut windows = Vec::new();
        for n in 0..settings.count(HANDOVERS, 2) {
            let begun = Instant::now();
            serving.server.resize(&subject.model, SHARES[n % 2]).await?;
            windows.push((begun, Instant::now()));
            serving.wait_single_worker(&subject.model).await?;
        }
        warming.push(windows);
    }
    let loaded = finish_all(running, true).await?;
    let names: Vec<&str> = loads.subjects.iter().map(|subject| subject.model.as_str()).collect();
    into_figures(figures, &names, &loaded, (calm, &warming));
    serving.stop(figures).await
}

fn into_figures(
    figures: &mut FigureStore,
    names: &[&str],
    loaded: &[LoadResult],
    (calm, warming): (TimeWindow, &[Vec<TimeWindow>]),
) {
    for (&model, windows) in names.iter().zip(warming) {
        let (mut incumbent, mut worst, mut each) = (None, None::<f64>, Map::new());
        for (&other, loaded) in names.iter().zip(loaded) {
            let (during, without) = (p99(&loaded.spans, windows), p99(&loaded.spans, &[calm]));
            let ratio = during.zip(without).map(|(during, without)| during / without);
            if other == model {
                incumbent = ratio;
            } else {
                worst = worst.into_iter().chain(ratio).reduce(f64::max);
            }
            each.insert(
                other.into(),
                json!({ "during_ms": during.map(rounded), "without_ms": without.map(rounded) }),
            );
        }
        let seconds: f64 = windows.iter().map(|(begun, end)| (*end - *begun).as_secs_f64()).sum();
        let of = json!({ "incumbent": incumbent.map(rounded), "neighbours": worst.map(rounded),
            "p99_ms": each, "warming_s": rounded(seconds) });
        figures.set(&["neighbour_p99_ratio", model], of);
    }
}

/// Returns the p99 latency in ms of the requests that were in flight in at least one of the
/// windows.
pub(crate) fn p99(spans: &[TrafficTimes], windows: &[TimeWindow]) -> Option<f64> {
    let within =
        |span: &&TrafficTimes| windows.iter().any(|(begun, end)| span.due < *end && span.end > *begun);
    let latencies: Vec<f64> =
        spans.iter().filter(within).map(|span| (span.end - span.due).as_secs_f64() * 1e3).collect();
    if latencies.len() < MIN_REQUESTS { None } else { quantile(&latencies, 0.99) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_requests_in_flight_in_a_window_count() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut spans: Vec<TrafficTimes> =
            (0..200).map(|n| TrafficTimes { due: at(n), end: at(n + 2) }).collect();
        spans.push(TrafficTimes { due: at(900), end: at(1000) });
        assert_eq!(p99(&spans, &[(at(0), at(300))]), Some(2.0));
        assert_eq!(p99(&spans, &[(at(950), at(960))]), None, "one request has no p99");
        assert_eq!(p99(&spans, &[(at(100), at(300))]), Some(2.0));
        assert_eq!(p99(&spans, &[(at(150), at(300))]), None);
    }
}
