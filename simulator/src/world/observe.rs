//! What is seen of a model: since the last decision, for the policy, and since the start, for people.

use std::collections::BTreeMap;
use std::time::Duration;

use shadowslice_policy::sharing::{Executed, Seen, leaves_time_for_the_way};

use crate::histogram::Histogram;

/// Counts and latencies over a span of time.
#[derive(Debug, Clone)]
pub(crate) struct Tally {
    pub(crate) arrived: u64,
    pub(crate) answered: u64,
    pub(crate) in_time: u64,
    pub(crate) refused: u64,
    pub(crate) latency_sum_ns: u128,
    pub(crate) latency: Histogram,
}

impl Tally {
    pub(crate) fn new() -> Self {
        let latency = Histogram::new();
        Self { arrived: 0, answered: 0, in_time: 0, refused: 0, latency_sum_ns: 0, latency }
    }

    pub(crate) fn add(&mut self, other: &Self) {
        self.arrived += other.arrived;
        self.answered += other.answered;
        self.in_time += other.in_time;
        self.refused += other.refused;
        self.latency_sum_ns += other.latency_sum_ns;
        self.latency.add(&other.latency);
    }

    pub(crate) fn answer(&mut self, latency_ns: u64, slo_ns: u64) {
        self.answered += 1;
        self.in_time += u64::from(latency_ns <= slo_ns);
        self.latency_sum_ns += u128::from(latency_ns);
        self.latency.record(latency_ns);
    }

    /// Zero without any answer.
    pub(crate) fn mean_ns(&self) -> u64 {
        u64::try_from(self.latency_sum_ns / u128::from(self.answered.max(1))).unwrap_or(u64::MAX)
    }

    fn clear(&mut self) {
        let Self { arrived, answered, in_time, refused, latency_sum_ns, latency } = self;
        (*arrived, *answered, *in_time, *refused, *latency_sum_ns) = (0, 0, 0, 0, 0);
        latency.clear();
    }
}

/// What is seen of a model.
#[derive(Debug)]
pub(super) struct Observer {
    /// Since the start.
    pub(super) total: Tally,
    /// Since the last decision.
    recent: Tally,
    /// Answered since then so early that their clients have them in time, too.
    in_good_time: u64,
    since: u64,
    busy: Busy,
    /// Batches at the share in force, by their rows: how many, and for how long.
    executed: BTreeMap<u32, (u64, Duration)>,
}

/// How long anything executed.
#[derive(Debug, Default)]
struct Busy {
    running: u32,
    since: u64,
    total: u64,
}

impl Observer {
    pub(super) fn new() -> Self {
        Self {
            total: Tally::new(),
            recent: Tally::new(),
            in_good_time: 0,
            since: 0,
            busy: Busy::default(),
            executed: BTreeMap::new(),
        }
    }

    pub(super) fn arrived(&mut self) {
        self.recent.arrived += 1;
    }

    pub(super) fn refused(&mut self, count: usize) {
        self.recent.refused += count as u64;
    }

    pub(super) fn answered(&mut self, latency_ns: u64, slo_ns: u64) {
        self.recent.answer(latency_ns, slo_ns);
        let (latency, slo) = (Duration::from_nanos(latency_ns), Duration::from_nanos(slo_ns));
        self.in_good_time += u64::from(leaves_time_for_the_way(latency, slo));
    }

    pub(super) fn started(&mut self, now: u64) {
        if self.busy.running == 0 {
            self.busy.since = now;
        }
        self.busy.running += 1;
    }

    pub(super) fn stopped(&mut self, now: u64) {
        self.busy.running -= 1;
        if self.busy.running == 0 {
            self.busy.total += now - self.busy.since;
        }
    }

    /// A batch executed at the share in force.
    pub(super) fn executed(&mut self, rows: u32, took: Duration) {
        let (count, sum) = self.executed.entry(rows).or_default();
        *count += 1;
        *sum += took;
    }

    /// Another share is in force: what executed before says nothing about it.
    pub(super) fn share_changed(&mut self) {
        self.executed.clear();
    }

    /// What was seen since the last decision.
    pub(super) fn seen(&self, queued: usize, now: u64) -> Seen {
        let span = now - self.since;
        let mean = |(count, sum): (u64, Duration)| sum / u32::try_from(count).unwrap_or(u32::MAX);
        let executed = self.executed.iter();
        let recent = &self.recent;
        Seen {
            span: Duration::from_nanos(span),
            arrived: recent.arrived,
            rows: recent.arrived,
            answered: recent.answered,
            in_time: recent.in_time,
            in_good_time: self.in_good_time,
            refused: recent.refused,
            queued,
            mean_latency: Duration::from_nanos(recent.mean_ns()),
            p99_latency: Duration::from_nanos(recent.latency.quantile(0.99)),
            busy: self.busy.until(now) as f64 / span.max(1) as f64,
            executed: executed
                .map(|(&rows, &sum)| Executed { rows, count: sum.0, mean: mean(sum) })
                .collect(),
        }
    }

    /// A decision was made: what comes is seen afresh.
    pub(super) fn decided(&mut self, now: u64) {
        self.total.add(&self.recent);
        self.recent.clear();
        self.in_good_time = 0;
        self.executed.clear();
        self.busy = Busy { since: now, total: 0, ..self.busy };
        self.since = now;
    }
}

impl Busy {
    fn until(&self, now: u64) -> u64 {
        self.total + if self.running > 0 { now - self.since } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_covers_the_span_and_starts_afresh() {
        let mut observer = Observer::new();
        (0..3).for_each(|_| observer.arrived());
        observer.refused(1);
        observer.started(100);
        observer.started(200);
        observer.stopped(300);
        observer.answered(10_000_000, 20_000_000);
        observer.answered(30_000_000, 20_000_000);
        observer.executed(2, Duration::from_millis(4));
        observer.executed(2, Duration::from_millis(8));
        let seen = observer.seen(7, 1_000);
        assert_eq!(seen, observer.seen(7, 1_000), "looking changes nothing");
        observer.decided(1_000);
        assert_eq!((seen.arrived, seen.answered, seen.in_time, seen.refused, seen.queued), (3, 2, 1, 1, 7));
        assert_eq!(seen.mean_latency, Duration::from_millis(20));
        assert!(seen.p99_latency.abs_diff(Duration::from_millis(30)) < Duration::from_micros(300));
        assert_eq!(seen.executed, [Executed { rows: 2, count: 2, mean: Duration::from_millis(6) }]);
        assert!((seen.busy - 0.9).abs() < 1e-9);
        let next = observer.seen(0, 2_000);
        assert_eq!((next.arrived, next.answered, next.span), (0, 0, Duration::from_nanos(1_000)));
        assert!((next.busy - 1.0).abs() < 1e-9, "the first batch still runs");
        assert_eq!((observer.total.arrived, observer.total.answered), (3, 2));
    }
}
