//! The recorder of a model's requests, from their arrival to their end. All figures of requests that
//! operators, load balancers and the sharing policy see come from this recorder.

mod counts;
mod minutes;
#[cfg(test)]
mod tests;

use std::time::Duration;

use hdrhistogram::Histogram;
use shadowslice_shared::units::Timestamp;

use crate::sharing::{BatchStats, Observation};

pub use counts::{TrafficCounts, TrafficWindow, Unanswered, is_in_time};
pub use minutes::Latencies;

use minutes::Minutes;

/// The maximum number of batch sizes that are recorded in an interval. Further sizes are not recorded.
const MAX_SIZES: usize = 256;

/// The longest latency that the histograms can represent, in µs: one hour.
const LONGEST_US: u64 = 3_600_000_000;

/// The number of full seconds that the recent traffic covers, in addition to the current second.
const SECONDS: u64 = 10;

/// The number of marks that are needed for these seconds.
const MARKS: u64 = SECONDS + 1;

/// The fraction of the SLO that is reserved for delivery: for the client, the network and the kernel's
/// buffers, which no server can measure. On H100s and an H200, delivery and the writing of answers took
/// 0.4 to 0.9 ms of SLOs of 4 to 8 ms, which is a tenth. The measured latency now includes the writing,
/// so only half of this tenth is reserved.
const DELIVERY_PART: f64 = 0.05;

/// The latencies of the requests that were answered since the previous call of
/// [`TrafficRecorder::take_latencies`], in ms.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RecentLatencies {
    /// The median latency, in ms.
    pub p50_ms: f64,
    /// The 99th percentile of the latency, in ms.
    pub p99_ms: f64,
}

/// The recorder of a model's requests.
#[derive(Debug)]
pub struct TrafficRecorder {
    began: Timestamp,
    total: TrafficCounts,
    /// The number of the current second, counted from `began`.
    second: u64,
    /// The counts at the start of each of the last seconds: a ring with one mark per second.
    marks: [TrafficCounts; MARKS as usize],
    minutes: Minutes,
    /// The latencies since the previous call of `take_latencies`.
    untaken_us: Histogram<u32>,
    /// The time until which the current execution is counted as busy time. `None` if no batch executes.
    busy_until: Option<Timestamp>,
    interval: Interval,
}

/// The interval since the last observation of the sharing policy.
#[derive(Debug)]
struct Interval {
    began: Timestamp,
    /// The counts at the start of the interval.
    counts: TrafficCounts,
    latency_us: Histogram<u32>,
    /// The executed batches by row count, ascending.
    executed: Vec<ExecutedBatches>,
}

/// The executed batches of one size.
#[derive(Debug)]
struct ExecutedBatches {
    rows: u32,
    count: u64,
    time: Duration,
}

fn histogram() -> Histogram<u32> {
    Histogram::new_with_max(LONGEST_US, 2).expect("a constant range and precision that fit")
}

/// Returns a quantile of latencies in ms, or zero if there are none.
fn quantile_ms(us: &Histogram<u32>, quantile: f64) -> f64 {
    if us.is_empty() { 0.0 } else { us.value_at_quantile(quantile) as f64 / 1e3 }
}

/// Returns the mean, or zero if the count is zero.
fn mean(sum: Duration, count: u64) -> Duration {
    sum / u32::try_from(count.max(1)).unwrap_or(u32::MAX)
}

impl TrafficRecorder {
    pub(super) fn new(now: Timestamp) -> Self {
        let counts = TrafficCounts::default();
        let executed = Vec::with_capacity(MAX_SIZES);
        Self {
            began: now,
            total: counts,
            second: 0,
            marks: [counts; MARKS as usize],
            minutes: Minutes::new(now),
            untaken_us: histogram(),
            busy_until: None,
            interval: Interval { began: now, counts, latency_us: histogram(), executed },
        }
    }

    pub(super) fn record_arrival(&mut self, rows: u32) {
        self.total.arrived += 1;
        self.total.rows += u64::from(rows);
    }

    pub(super) fn record_answer(&mut self, latency: Duration, slo: Duration, now: Timestamp) {
        self.advance(now);
        self.total.add_answer(latency, slo);
        let us = u64::try_from(latency.as_micros()).unwrap_or(LONGEST_US);
        self.minutes.record(us);
        self.untaken_us.saturating_record(us);
        self.interval.latency_us.saturating_record(us);
    }

    pub(super) fn record_unanswered(&mut self, how: Unanswered, slo: Duration, now: Timestamp) {
        self.advance(now);
        self.total.add_unanswered(how, slo);
    }

    pub(super) fn record_batch(&mut self, rows: u32, took: Duration) {
        let executed = &mut self.interval.executed;
        match executed.binary_search_by_key(&rows, |size| size.rows) {
            Ok(index) => {
                let size = &mut executed[index];
                size.count += 1;
                size.time = size.time.saturating_add(took);
            }
            Err(index) if executed.len() < MAX_SIZES => {
                executed.insert(index, ExecutedBatches { rows, count: 1, time: took });
            }
            Err(_) => {}
        }
    }

    /// Discards the executed batches, because the share changed.
    pub(super) fn forget_batches(&mut self) {
        self.interval.executed.clear();
    }

    pub(super) fn set_busy(&mut self, executes: bool, now: Timestamp) {
        match (self.busy_until, executes) {
            (None, true) => self.busy_until = Some(now),
            (Some(_), false) => {
                self.advance(now);
                self.busy_until = None;
            }
            _ => {}
        }
    }

    /// Returns the counts since the start.
    pub fn total(&self) -> TrafficCounts {
        self.total
    }

    /// Returns the figures of the last ten seconds and of the current second.
    pub fn recent(&mut self, now: Timestamp) -> TrafficWindow {
        self.advance(now);
        let first = self.second.saturating_sub(SECONDS);
        let span = now.since(self.began).saturating_sub(Duration::from_secs(first));
        TrafficWindow { span, counts: self.total - self.mark(first) }
    }

    /// Returns the counts of the last full second. They are zero before the first second is over.
    pub fn last_second(&mut self, now: Timestamp) -> TrafficCounts {
        self.advance(now);
        self.mark(self.second) - self.mark(self.second.saturating_sub(1))
    }

    /// Returns the latencies of the last one to two minutes, where `percentile` is the SLO's percentile.
    pub fn latencies(&mut self, percentile: f64, now: Timestamp) -> Latencies {
        self.advance(now);
        self.minutes.latencies(percentile, self.total, now)
    }

    /// Returns the latencies since the previous call, or `None` if no request was answered since.
    pub fn take_latencies(&mut self) -> Option<RecentLatencies> {
        let ms = |quantile| quantile_ms(&self.untaken_us, quantile);
        let recent = RecentLatencies { p50_ms: ms(0.5), p99_ms: ms(0.99) };
        let is_empty = self.untaken_us.is_empty();
        self.untaken_us.reset();
        (!is_empty).then_some(recent)
    }

    /// Returns the observation of the current interval, and starts a new interval.
    pub(super) fn observe(&mut self, queued: usize, now: Timestamp) -> Observation {
        self.advance(now);
        let interval = &mut self.interval;
        let counts = self.total - std::mem::replace(&mut interval.counts, self.total);
        let began = std::mem::replace(&mut interval.began, now);
        let window = TrafficWindow { span: now.since(began), counts };
        let p99_latency = Duration::from_micros(interval.latency_us.value_at_quantile(0.99));
        interval.latency_us.reset();
        let executed = interval.executed.drain(..);
        let batches = executed.map(|ExecutedBatches { rows, count, time }| BatchStats {
            rows,
            count,
            mean: mean(time, count),
        });
        Observation {
            span: window.span,
            arrived: counts.arrived,
            rows: counts.rows,
            answered: counts.answered,
            in_time_at_client: counts.in_time_at_client,
            attainment: counts.attainment(),
            refused: counts.unserved,
            queued,
            mean_latency: mean(counts.latency, counts.answered),
            p99_latency,
            busy: window.busy(),
            batches: batches.collect(),
        }
    }

    /// Returns the counts at the start of one of the last seconds.
    fn mark(&self, second: u64) -> TrafficCounts {
        self.marks[(second % MARKS) as usize]
    }

    /// Counts the current execution as busy time until `until`.
    fn count_busy(&mut self, until: Timestamp) {
        if let Some(counted) = &mut self.busy_until {
            self.total.busy += until.since(*counted);
            *counted = until.max(*counted);
        }
    }

    /// Advances all windows to `now`. Call this before an event is counted.
    fn advance(&mut self, now: Timestamp) {
        let second = now.since(self.began).as_secs().max(self.second);
        for begun in (self.second + 1).max(second.saturating_sub(SECONDS))..=second {
            self.count_busy(self.began + Duration::from_secs(begun));
            self.marks[(begun % MARKS) as usize] = self.total;
        }
        self.second = second;
        self.count_busy(now);
        self.minutes.advance(self.total, now);
    }
}
