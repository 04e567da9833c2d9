//! The latencies of the last one to two minutes.

use std::borrow::Cow;
use std::time::Duration;

use hdrhistogram::Histogram;
use shadowslice_shared::units::Timestamp;

use super::counts::{TrafficCounts, TrafficWindow};
use super::{histogram, quantile_ms};

/// The length of a window of latencies. Percentiles cover one to two windows.
const WINDOW: Duration = Duration::from_secs(60);

/// The answers of the last one to two minutes.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Latencies {
    /// The median latency, in ms.
    pub p50_ms: f64,
    /// The 99th percentile of the latency, in ms.
    pub p99_ms: f64,
    /// The latency at the SLO's percentile, in ms. `None` if no request was answered.
    pub slo_percentile_ms: Option<f64>,
    /// The requests of the same period.
    pub traffic: TrafficWindow,
}

/// Two windows of latencies, and the counts at the start of each window.
#[derive(Debug)]
pub(super) struct Minutes {
    current: Window,
    /// The previous window. Initially it equals the current window.
    previous: Window,
}

#[derive(Debug)]
struct Window {
    began: Timestamp,
    counts: TrafficCounts,
    latency_us: Histogram<u32>,
}

impl Window {
    fn new(began: Timestamp) -> Self {
        Self { began, counts: TrafficCounts::default(), latency_us: histogram() }
    }

    fn restart(&mut self, began: Timestamp, counts: TrafficCounts) {
        (self.began, self.counts) = (began, counts);
        self.latency_us.reset();
    }
}

impl Minutes {
    pub(super) fn new(now: Timestamp) -> Self {
        Self { current: Window::new(now), previous: Window::new(now) }
    }

    /// Starts a new window if the current window is complete. `total` are the counts until now.
    pub(super) fn advance(&mut self, total: TrafficCounts, now: Timestamp) {
        let age = now.since(self.current.began);
        if age < WINDOW {
            return;
        }
        std::mem::swap(&mut self.current, &mut self.previous);
        self.current.restart(now, total);
        if age >= WINDOW * 2 {
            self.previous.restart(now, total);
        }
    }

    pub(super) fn record(&mut self, us: u64) {
        self.current.latency_us.saturating_record(us);
    }

    /// Returns the latencies, where `percentile` is the SLO's percentile.
    pub(super) fn latencies(&self, percentile: f64, total: TrafficCounts, now: Timestamp) -> Latencies {
        let (current, previous) = (&self.current.latency_us, &self.previous.latency_us);
        // Merging histograms is expensive, so an empty histogram is not merged. Most models are
        // idle most of the time.
        let both = match (current.is_empty(), previous.is_empty()) {
            (true, _) => Cow::Borrowed(previous),
            (_, true) => Cow::Borrowed(current),
            _ => {
                let mut both = previous.clone();
                both.add(current).expect("both have the same range");
                Cow::Owned(both)
            }
        };
        let span = now.since(self.previous.began);
        Latencies {
            p50_ms: quantile_ms(&both, 0.5),
            p99_ms: quantile_ms(&both, 0.99),
            slo_percentile_ms: (!both.is_empty()).then(|| quantile_ms(&both, percentile / 100.0)),
            traffic: TrafficWindow { span, counts: total - self.previous.counts },
        }
    }
}
