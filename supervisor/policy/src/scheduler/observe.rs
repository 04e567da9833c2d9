//! The collection of a model's statistics in each interval, for its sharing policy.

use std::time::Duration;

use hdrhistogram::Histogram;
use shadowslice_shared::units::Timestamp;

use crate::sharing::{BatchStats, Observation, leaves_time_for_delivery};

/// The maximum number of batch sizes that are recorded in an interval. Further sizes are not recorded.
const MAX_SIZES: usize = 256;

/// The maximum latency in the histogram, in µs, which is one minute. Longer latencies count as one
/// minute.
const LONGEST_US: u64 = 60_000_000;

/// The collector of a model's statistics in the current interval.
#[derive(Debug)]
pub(super) struct Observer {
    since: Timestamp,
    /// The counts of the observation. `take` fills in the other fields.
    counts: Observation,
    latency_sum: Duration,
    latency_us: Histogram<u32>,
    busy: BusyTime,
    /// The executed batches by row count, ascending: the number of rows, the number of batches, and
    /// their total time.
    executed: Vec<(u32, u64, Duration)>,
}

/// The time during which batches executed.
#[derive(Debug, Default)]
struct BusyTime {
    /// The time at which the current execution started.
    since: Option<Timestamp>,
    total: Duration,
}

impl Observer {
    pub(super) fn new(now: Timestamp) -> Self {
        Self {
            since: now,
            counts: Observation::default(),
            latency_sum: Duration::ZERO,
            latency_us: Histogram::new_with_max(LONGEST_US, 2)
                .expect("a constant range and precision that fit"),
            busy: BusyTime::default(),
            executed: Vec::with_capacity(MAX_SIZES),
        }
    }

    pub(super) fn record_arrival(&mut self, rows: u32) {
        self.counts.arrived += 1;
        self.counts.rows += u64::from(rows);
    }

    pub(super) fn record_refusal(&mut self) {
        self.counts.refused += 1;
    }

    pub(super) fn record_answer(&mut self, latency: Duration, slo: Duration) {
        self.counts.answered += 1;
        self.counts.in_time += u64::from(latency <= slo);
        self.counts.in_time_at_client += u64::from(leaves_time_for_delivery(latency, slo));
        self.latency_sum += latency;
        self.latency_us.saturating_record(u64::try_from(latency.as_micros()).unwrap_or(LONGEST_US));
    }

    pub(super) fn record_batch(&mut self, rows: u32, took: Duration) {
        match self.executed.binary_search_by_key(&rows, |size| size.0) {
            Ok(index) => {
                let (_, count, sum) = &mut self.executed[index];
                *count += 1;
                *sum = sum.saturating_add(took);
            }
            Err(index) if self.executed.len() < MAX_SIZES => self.executed.insert(index, (rows, 1, took)),
            Err(_) => {}
        }
    }

    /// Discards the executed batches, because the share changed.
    pub(super) fn forget_batches(&mut self) {
        self.executed.clear();
    }

    pub(super) fn set_busy(&mut self, executes: bool, now: Timestamp) {
        match (self.busy.since, executes) {
            (None, true) => self.busy.since = Some(now),
            (Some(since), false) => {
                self.busy.total += now.since(since);
                self.busy.since = None;
            }
            _ => {}
        }
    }

    /// Returns the observation of the current interval, and starts a new interval.
    pub(super) fn take(&mut self, queued: usize, now: Timestamp) -> Observation {
        let span = now.since(self.since);
        let going_on = self.busy.since.map_or(Duration::ZERO, |since| now.since(since));
        let busy = (self.busy.total + going_on).as_secs_f64() / span.as_secs_f64().max(1e-9);
        let executed = self.executed.drain(..);
        let counts = std::mem::take(&mut self.counts);
        let seen = Observation {
            span,
            queued,
            mean_latency: mean(self.latency_sum, counts.answered),
            p99_latency: Duration::from_micros(self.latency_us.value_at_quantile(0.99)),
            busy: busy.clamp(0.0, 1.0),
            batches: executed
                .map(|(rows, count, sum)| BatchStats { rows, count, mean: mean(sum, count) })
                .collect(),
            ..counts
        };
        self.since = now;
        self.latency_sum = Duration::ZERO;
        self.latency_us.reset();
        self.busy = BusyTime { since: self.busy.since.map(|_| now), total: Duration::ZERO };
        seen
    }
}

/// Returns the mean, or zero if the count is zero.
fn mean(sum: Duration, count: u64) -> Duration {
    sum / u32::try_from(count.max(1)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn at(after: u64) -> Timestamp {
        Timestamp::after_origin(ms(after))
    }

    #[test]
    fn each_look_sees_what_came_since_the_last() {
        let mut observer = Observer::new(at(0));
        (1..=5).for_each(|rows| observer.record_arrival(rows));
        observer.record_refusal();
        observer.set_busy(true, at(20));
        observer.set_busy(true, at(30));
        observer.set_busy(false, at(40));
        observer.set_busy(true, at(90));
        observer.record_answer(Duration::from_micros(19_500), ms(20));
        observer.record_answer(Duration::from_micros(20_500), ms(20));
        for (rows, took) in [(8, 7), (2, 3), (2, 5)] {
            observer.record_batch(rows, ms(took));
        }
        let seen = observer.take(2, at(100));
        assert_eq!((seen.span, seen.arrived, seen.rows), (ms(100), 5, 15));
        assert_eq!((seen.refused, seen.queued), (1, 2));
        assert_eq!((seen.answered, seen.in_time, seen.mean_latency), (2, 1, ms(20)));
        assert_eq!(seen.in_time_at_client, 0, "a twentieth of the SLO is for the way");
        assert!(seen.p99_latency.abs_diff(ms(21)) < ms(1), "{:?}", seen.p99_latency);
        assert!((seen.busy - 0.3).abs() < 1e-9, "{}", seen.busy);
        let executed = |rows, count, took| BatchStats { rows, count, mean: ms(took) };
        assert_eq!(seen.batches, [executed(2, 2, 4), executed(8, 1, 7)]);
        let next = observer.take(0, at(150));
        assert_eq!(
            next,
            Observation { span: ms(50), busy: 1.0, ..Observation::default() },
            "one still executes"
        );
    }

    #[test]
    fn nothing_at_all_in_no_time_is_no_division_by_zero() {
        let seen = Observer::new(at(7)).take(0, at(7));
        assert_eq!(seen, Observation::default());
    }

    #[test]
    fn sizes_have_their_bound_and_another_share_its_own_times() {
        let mut observer = Observer::new(at(0));
        (0..10_000).for_each(|rows| observer.record_batch(rows, ms(1)));
        assert_eq!(observer.executed.len(), MAX_SIZES);
        observer.forget_batches();
        assert!(observer.take(0, at(1)).batches.is_empty());
    }
}
