//! The figures of a load.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::MeasureError;

/// The upper bound of durations in a histogram, in microseconds. No request takes longer than its timeout.
const LONGEST_US: u64 = 60_000_000;

/// The durations of requests or loads.
#[derive(Debug, Clone)]
pub(super) struct DurationTally(Histogram<u64>);

impl Default for DurationTally {
    fn default() -> Self {
        Self(Histogram::new_with_max(LONGEST_US, 3).expect("the bounds are constants that are valid"))
    }
}

impl DurationTally {
    /// Adds a duration.
    pub(super) fn record(&mut self, took: Duration) {
        self.0.saturating_record(u64::try_from(took.as_micros()).unwrap_or(LONGEST_US));
    }

    /// Returns the count and the quantiles.
    pub(super) fn summary(&self) -> DurationSummary {
        let ms = |quantile| self.0.value_at_quantile(quantile) as f64 / 1e3;
        DurationSummary { count: self.0.len(), p50_ms: ms(0.5), p99_ms: ms(0.99), max_ms: ms(1.0) }
    }
}

/// The quantiles of durations. All are 0 if `count` is 0.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct DurationSummary {
    pub(super) count: u64,
    pub(super) p50_ms: f64,
    pub(super) p99_ms: f64,
    pub(super) max_ms: f64,
}

/// The figures of one load on one server.
#[derive(Debug, Default)]
pub(super) struct LoadFigures {
    /// The latencies of requests whose model was not on the GPU when they arrived.
    pub(super) absent: DurationTally,
    /// The latencies of requests whose model was on the GPU.
    pub(super) present: DurationTally,
    /// The durations of the client's loads.
    pub(super) loads: DurationTally,
    /// The delays between the planned time of a request and its start.
    pub(super) late: DurationTally,
    failed: u64,
    first_failure: Option<String>,
}

impl LoadFigures {
    /// Counts a request that was lost, refused, wrong or too late.
    pub(super) fn fail(&mut self, failure: &MeasureError) {
        self.failed += 1;
        self.first_failure.get_or_insert_with(|| shadowslice_shared::errors::chain(&**failure));
    }

    /// Returns the result. `wakes` replaces the client's loads if the server counted its wakes.
    pub(super) fn result(
        self,
        server: String,
        per_second: f64,
        wakes: Option<WakeCounts>,
    ) -> ManyModelsResult {
        let loads = self.loads.summary();
        let (loads, load_ms) = match wakes {
            Some(WakeCounts { wakes, seconds }) => (wakes, 1e3 * seconds / wakes.max(1) as f64),
            None => (loads.count, self.loads.0.mean() / 1e3),
        };
        ManyModelsResult {
            server,
            per_second,
            absent: self.absent.summary(),
            present: self.present.summary(),
            failed: self.failed,
            first_failure: self.first_failure,
            loads,
            load_ms,
            late: self.late.summary(),
        }
    }
}

/// The number of all wakes of a server, and the sum of their times.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct WakeCounts {
    pub(super) wakes: u64,
    pub(super) seconds: f64,
}

impl WakeCounts {
    /// Returns the wakes after an earlier count.
    pub(super) fn since(self, earlier: Self) -> Self {
        Self { wakes: self.wakes - earlier.wakes, seconds: self.seconds - earlier.seconds }
    }
}

/// The result of one load on one server.
#[derive(Debug, Serialize)]
pub(crate) struct ManyModelsResult {
    pub(super) server: String,
    pub(super) per_second: f64,
    pub(super) absent: DurationSummary,
    pub(super) present: DurationSummary,
    /// The number of requests that were lost, refused, wrong or too late.
    pub(super) failed: u64,
    pub(super) first_failure: Option<String>,
    /// The number of loads or wakes.
    pub(super) loads: u64,
    /// The mean time of a load or wake, in ms.
    pub(super) load_ms: f64,
    /// The delays of the client itself.
    pub(super) late: DurationSummary,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_count_but_have_no_latency() {
        let mut figures = LoadFigures::default();
        figures.absent.record(Duration::from_millis(20));
        figures.present.record(Duration::from_millis(2));
        figures.loads.record(Duration::from_millis(8));
        figures.fail(&"first".into());
        figures.fail(&"second".into());
        let result = figures.result("x".to_owned(), 1.0, None);
        assert_eq!((result.failed, result.first_failure.as_deref()), (2, Some("first")));
        assert_eq!((result.absent.count, result.present.count, result.loads), (1, 1, 1));
        assert!((result.absent.p99_ms - 20.0).abs() < 0.1 && (result.present.p50_ms - 2.0).abs() < 0.1);
        assert!((result.load_ms - 8.0).abs() < 0.1, "{}", result.load_ms);
    }

    #[test]
    fn the_wakes_of_the_server_replace_the_loads_of_the_client() {
        let wakes = WakeCounts { wakes: 7, seconds: 0.5 }.since(WakeCounts { wakes: 3, seconds: 0.4 });
        let result = LoadFigures::default().result("x".to_owned(), 1.0, Some(wakes));
        assert!(result.loads == 4 && (result.load_ms - 25.0).abs() < 1e-6, "{result:?}");
        let none = LoadFigures::default().result("x".to_owned(), 1.0, Some(WakeCounts::default()));
        assert_eq!(none.load_ms, 0.0);
    }
}
