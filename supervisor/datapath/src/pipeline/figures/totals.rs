//! The totals of a model's requests and batches since the start, over all workers.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use super::durations::{Durations, RequestTimes};
use super::histogram::LatencyHistogram;
use crate::pipeline::cache::CacheCounts;

/// The number of events and their total time.
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

/// The total times of batches in each stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BatchStageTotals {
    /// The time to copy the inputs of all requests into the model's slab.
    pub input: Total,
    /// The execution time that the worker reports.
    pub infer: Total,
    /// The time to check the answer, and to copy the outputs out of the worker's slab.
    pub output: Total,
}

/// The histograms and sums of a model. They never decrease.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Totals {
    /// The receiving time of each request that reached the model, from the request's head to its
    /// last byte.
    pub receiving: Total,
    /// The latency of each answered request, from the request's first byte to the answer's last
    /// byte.
    pub latency: LatencyHistogram,
    /// The time of each answered request from its last byte until its batch was sent.
    pub queue_wait: Total,
    /// The time of each answered request from the worker's answer until the client's socket
    /// accepted it.
    pub writing: Total,
    /// The execution time of each answered batch, as the worker reported it.
    pub batch_execution: Total,
    pub durations: Durations,
    /// The time from the arrival to the end of requests that were refused, failed, timed out or
    /// cancelled.
    pub fail: Total,
    /// The number of rows in all answered requests.
    pub rows: u64,
    pub last: Option<SystemTime>,
    /// The execution time of each step of streams, as the worker reported it.
    pub stream_steps: Total,
    /// The time of each answer in a stream after the first one, from the request for it.
    pub stream_gaps: LatencyHistogram,
    /// The number of streams that failed after their first answer.
    pub streams_failed: u64,
    /// The counts of the cache of answers, or `None` if the model has no cache.
    pub cache: Option<CacheCounts>,
    /// The totals of batches for each number of rows. There are at most `batch.max` different
    /// numbers of rows.
    pub by_rows: BTreeMap<u32, BatchStageTotals>,
}

/// The time of a batch in each stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BatchTimes {
    pub(crate) input: Duration,
    pub(crate) infer: Duration,
    pub(crate) output: Duration,
}

impl Totals {
    pub(crate) fn add_answer(&mut self, spent: &RequestTimes) {
        self.latency.record(spent.latency);
        self.queue_wait.add(spent.until_sent);
        self.writing.add(spent.writing);
        self.durations.add(spent);
    }

    /// Counts an answered batch of `rows` rows. Clients still waited for `wanted` of these rows.
    pub(crate) fn add_batch(&mut self, rows: u32, wanted: u32, took: BatchTimes, at: SystemTime) {
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
    fn batches_are_counted_by_size_and_rows_only_if_a_client_waited() {
        let ms = Duration::from_millis;
        let mut totals = Totals::default();
        let took = BatchTimes { input: ms(1), infer: ms(5), output: ms(2) };
        for (rows, wanted) in [(7, 6), (7, 7), (1, 0)] {
            totals.add_batch(rows, wanted, took, SystemTime::UNIX_EPOCH);
        }
        assert_eq!((totals.rows, totals.last), (13, Some(SystemTime::UNIX_EPOCH)));
        let BatchStageTotals { input, infer, output } = totals.by_rows[&7];
        let twice = |time| Total { count: 2, time: ms(time) };
        assert_eq!((input, infer, output), (twice(2), twice(10), twice(4)));
        assert_eq!(totals.by_rows[&1].infer, Total { count: 1, time: ms(5) });
    }
}
