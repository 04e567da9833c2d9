//! The counts of a model's requests by their outcome, and of its pauses.

use hdrhistogram::Histogram;

/// The number of significant digits of latencies in the histogram. The histogram covers 1 µs to 19
/// hours.
const DIGITS: u8 = 2;
const LEAST_NS: u64 = 1_000;
const MOST_NS: u64 = 1_000 << 36;

/// The counts and latencies of requests since the start.
#[derive(Debug, Clone)]
pub(crate) struct RequestTally {
    pub(crate) arrived: u64,
    pub(crate) answered: u64,
    pub(crate) in_time: u64,
    pub(crate) refused: u64,
    pub(crate) latency_sum_ns: u128,
    pub(crate) latency: Histogram<u64>,
}

impl RequestTally {
    pub(crate) fn new() -> Self {
        let latency =
            Histogram::new_with_bounds(LEAST_NS, MOST_NS, DIGITS).expect("the bounds are far enough apart");
        Self { arrived: 0, answered: 0, in_time: 0, refused: 0, latency_sum_ns: 0, latency }
    }

    /// Adds the counts and latencies of another tally to this one.
    pub(crate) fn add(&mut self, other: &Self) {
        self.arrived += other.arrived;
        self.answered += other.answered;
        self.in_time += other.in_time;
        self.refused += other.refused;
        self.latency_sum_ns += other.latency_sum_ns;
        self.latency.add(&other.latency).expect("all have the same bounds");
    }

    /// Counts an answered request, which is in time if its latency is at most the SLO.
    pub(crate) fn answer(&mut self, latency_ns: u64, slo_ns: u64) {
        self.answered += 1;
        self.in_time += u64::from(latency_ns <= slo_ns);
        self.latency_sum_ns += u128::from(latency_ns);
        self.latency.saturating_record(latency_ns);
    }

    /// Returns the mean latency in ns. Without answers, returns 0.
    pub(crate) fn mean_ns(&self) -> u64 {
        u64::try_from(self.latency_sum_ns / u128::from(self.answered.max(1))).unwrap_or(u64::MAX)
    }
}

/// The waits of a worker's batches between two pieces since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct PauseTally {
    pub(crate) count: u64,
    /// The sum of the times of all waits, in ns.
    pub(crate) sum_ns: u64,
    pub(crate) longest_ns: u64,
}

impl PauseTally {
    pub(crate) fn add(&mut self, ns: u64) {
        self.count += 1;
        self.sum_ns += ns;
        self.longest_ns = self.longest_ns.max(ns);
    }

    /// Returns the waits of both workers together.
    pub(crate) fn with(self, other: Self) -> Self {
        Self {
            count: self.count + other.count,
            sum_ns: self.sum_ns + other.sum_ns,
            longest_ns: self.longest_ns.max(other.longest_ns),
        }
    }
}
