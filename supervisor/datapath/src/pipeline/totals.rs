//! Totals of one model's requests and batches since the start.

use std::time::Duration;

use super::durations::{Durations, Spent};
use super::histogram::{LatencyHistogram, RowsHistogram};

/// Histograms and sums. They only grow.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Totals {
    /// Of each request that reached the model: from its head to its end.
    pub coming: LatencyHistogram,
    /// Of each answered request: from the beginning of its coming, as far as that counts, to the answer.
    pub latency: LatencyHistogram,
    /// Of each answered request: from when it was all there to the sending of its batch.
    pub queue_wait: LatencyHistogram,
    /// Of each answered batch: its rows.
    pub batch_rows: RowsHistogram,
    /// Of each answered batch: how long it executed, as its worker reported it.
    pub batch_execution: LatencyHistogram,
    /// Where the time of answered requests went.
    pub durations: Durations,
}

impl Totals {
    pub(crate) fn answered(&mut self, spent: &Spent) {
        self.latency.record(spent.latency);
        self.queue_wait.record(spent.until_sent);
        self.durations.add(spent);
    }

    /// Adds a batch of so many rows, which executed for so long.
    pub fn executed(&mut self, rows: u32, took: Duration) {
        self.batch_rows.record(rows);
        self.batch_execution.record(took);
    }
}
