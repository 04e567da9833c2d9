//! Totals of one model's requests and batches since the start, whichever workers served.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use super::durations::{Durations, RequestTimes};
use super::histogram::LatencyHistogram;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Total {
    pub count: u64,
    pub time: Duration,
}

impl Total {
    pub fn add(&mut self, time: Duration) {
        self.count += 1;
        self.time = self.time.saturating_add(time);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BatchStageTotals {
    /// Copying the inputs of all requests into the model's slab.
    pub input: Total,
    /// Executing, as the worker reported it.
    pub infer: Total,
    /// Checking the answer and copying outputs out of the worker's slab.
    pub output: Total,
}

/// Histograms and sums. They only grow.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Totals {
    /// Of each request that reached the model: from its head to its end.
    pub receiving: Total,
    /// The latency of each answered request, from its first byte to the answer's last byte.
    pub latency: LatencyHistogram,
    /// Of each answered request: from when it was all there to the sending of its batch.
    pub queue_wait: Total,
    /// The time of each answered request from its worker's answer until its client's socket had it.
    pub writing: Total,
    /// Of each answered batch: how long it executed, as its worker reported it.
    pub batch_execution: Total,
    pub durations: Durations,
    /// Requests refused, failed, timed out, or given up by their clients, from arrival to that.
    pub fail: Total,
    /// Rows of the requests that were answered.
    pub rows: u64,
    pub last: Option<SystemTime>,
    /// Of answers after the first of their stream, as their workers reported them.
    pub stream_steps: Total,
    /// Streams that broke off after their first answer.
    pub streams_failed: u64,
    /// Batches by their rows, of which there are at most as many sizes as `batch.max`.
    pub by_rows: BTreeMap<u32, BatchStageTotals>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BatchTimes {
    pub(crate) input: Duration,
    pub(crate) infer: Duration,
    pub(crate) output: Duration,
}

impl Totals {
    pub(crate) fn answered(&mut self, spent: &RequestTimes) {
        self.latency.record(spent.latency);
        self.queue_wait.add(spent.until_sent);
        self.writing.add(spent.writing);
        self.durations.add(spent);
    }

    /// A batch of `rows` was answered; clients still waited for `wanted` of the rows.
    pub(crate) fn executed(&mut self, rows: u32, wanted: u32, took: BatchTimes, at: SystemTime) {
        self.batch_execution.add(took.infer);
        self.rows += u64::from(wanted);
        self.last = Some(at);
        let steps = self.by_rows.entry(rows).or_default();
        steps.input.add(took.input);
        steps.infer.add(took.infer);
        steps.output.add(took.output);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_told_apart_by_their_size_and_rows_by_whether_a_client_waited() {
        let ms = Duration::from_millis;
        let mut totals = Totals::default();
        let took = BatchTimes { input: ms(1), infer: ms(5), output: ms(2) };
        for (rows, wanted) in [(7, 6), (7, 7), (1, 0)] {
            totals.executed(rows, wanted, took, SystemTime::UNIX_EPOCH);
        }
        assert_eq!((totals.rows, totals.last), (13, Some(SystemTime::UNIX_EPOCH)));
        let BatchStageTotals { input, infer, output } = totals.by_rows[&7];
        let twice = |time| Total { count: 2, time: ms(time) };
        assert_eq!((input, infer, output), (twice(2), twice(10), twice(4)));
        assert_eq!(totals.by_rows[&1].infer, Total { count: 1, time: ms(5) });
    }
}
