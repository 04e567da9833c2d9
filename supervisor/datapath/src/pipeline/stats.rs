//! The counts and latencies of one model.

use std::borrow::Cow;
use std::time::Duration;

use hdrhistogram::Histogram;
use shadowslice_config::SloTarget;
use shadowslice_shared::units::Timestamp;

use super::counts::{CountedRefusal, RequestCounts};
use super::durations::RequestTimes;
use super::load::LoadMeter;
use super::rates::{End, RateMeter};
use super::totals::Totals;

/// The length of a window of latencies. Percentiles cover one to two windows.
const WINDOW: Duration = Duration::from_secs(60);

/// The shortest period over which a rate is calculated.
const SHORTEST: Duration = Duration::from_secs(1);

/// The longest latency that the histograms can represent, in µs: one hour.
const LONGEST_US: u64 = 3_600_000_000;

/// The latencies of the last one to two minutes.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Latencies {
    pub p50_ms: f64,
    pub p99_ms: f64,
    /// The latency at the SLO's percentile, in ms. `None` if no request was answered.
    pub slo_percentile_ms: Option<f64>,
    /// The fraction of offered requests that were answered within the SLO. It is 1 if no requests
    /// were offered.
    pub attainment: f64,
    /// The number of offered requests per second.
    pub rate: f64,
}

/// The latencies of the requests that were answered since the previous call of
/// `take_recent_latencies`, in ms.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RecentLatencies {
    pub p50_ms: f64,
    pub p99_ms: f64,
}

#[derive(Debug)]
pub(crate) struct Stats {
    pub(crate) counts: RequestCounts,
    pub(crate) totals: Totals,
    pub(crate) slo: SloTarget,
    /// The start of the previous window. Initially it equals the start of the current window.
    previous_began: Timestamp,
    began: Timestamp,
    current: Window,
    previous: Window,
    /// The latencies since the previous call of `take_recent_latencies`.
    unseen_us: Histogram<u32>,
    pub(super) load: LoadMeter,
    pub(super) rates: RateMeter,
}

#[derive(Debug)]
struct Window {
    latency_us: Histogram<u32>,
    offered: u64,
    within: u64,
}

impl Window {
    fn new() -> Self {
        Self { latency_us: histogram(), offered: 0, within: 0 }
    }

    fn clear(&mut self) {
        self.latency_us.reset();
        self.offered = 0;
        self.within = 0;
    }
}

fn histogram() -> Histogram<u32> {
    Histogram::new_with_max(LONGEST_US, 2).expect("a constant range and precision that fit")
}

impl Stats {
    pub(crate) fn new(slo: SloTarget, now: Timestamp) -> Self {
        Self {
            counts: RequestCounts::default(),
            totals: Totals::default(),
            slo,
            previous_began: now,
            began: now,
            current: Window::new(),
            previous: Window::new(),
            unseen_us: histogram(),
            load: LoadMeter::new(now),
            rates: RateMeter::new(now),
        }
    }

    pub(crate) fn count_success(&mut self, spent: &RequestTimes, now: Timestamp) {
        let latency = spent.latency;
        self.counts.succeeded += 1;
        self.totals.add_answer(spent);
        self.load.count_answer(latency, self.slo.latency, now);
        self.rates.count(End::Other, now);
        let in_time = latency <= self.slo.latency;
        let us = u64::try_from(latency.as_micros()).unwrap_or(LONGEST_US);
        self.unseen_us.saturating_record(us);
        let window = self.window(now);
        window.latency_us.saturating_record(us);
        window.offered += 1;
        if in_time {
            self.current.within += 1;
            self.counts.within_slo += 1;
        }
    }

    /// Counts an accepted request that failed. `waited` is the time since the request's arrival.
    pub(crate) fn count_failure(&mut self, waited: Duration, now: Timestamp) {
        self.counts.failed += 1;
        self.rates.count(End::Failed, now);
        self.totals.fail.add(waited);
        self.load.count_error(now);
        self.window(now).offered += 1;
    }

    pub(crate) fn count_refusal(&mut self, why: CountedRefusal, waited: Duration, now: Timestamp) {
        self.counts.refuse(why);
        self.rates.count(End::Refused, now);
        self.totals.fail.add(waited);
        if why != CountedRefusal::TooLarge {
            self.load.count_error(now);
            self.window(now).offered += 1;
        }
    }

    /// Counts an accepted request that is invalid. The SLO does not apply to such a request.
    pub(crate) fn count_invalid(&mut self, waited: Duration) {
        self.counts.invalid += 1;
        self.totals.fail.add(waited);
    }

    /// Counts a request that its client cancelled. The request counts as a miss if the SLO has
    /// passed.
    pub(crate) fn count_cancellation(&mut self, waited: Duration, now: Timestamp) {
        self.counts.cancelled += 1;
        self.rates.count(End::Other, now);
        self.totals.fail.add(waited);
        if waited >= self.slo.latency {
            self.window(now).offered += 1;
        }
    }

    pub(crate) fn latencies(&mut self, now: Timestamp) -> Latencies {
        self.window(now);
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
        let offered = self.previous.offered + self.current.offered;
        let within = self.previous.within + self.current.within;
        let ms = |quantile| if both.is_empty() { 0.0 } else { both.value_at_quantile(quantile) as f64 / 1e3 };
        Latencies {
            p50_ms: ms(0.5),
            p99_ms: ms(0.99),
            slo_percentile_ms: (!both.is_empty()).then(|| ms(self.slo.percentile / 100.0)),
            attainment: if offered == 0 { 1.0 } else { within as f64 / offered as f64 },
            rate: offered as f64 / now.since(self.previous_began).max(SHORTEST).as_secs_f64(),
        }
    }

    /// Returns the latencies since the previous call, or `None` if no request was answered since.
    pub(crate) fn take_recent_latencies(&mut self) -> Option<RecentLatencies> {
        if self.unseen_us.is_empty() {
            return None;
        }
        let ms = |quantile| self.unseen_us.value_at_quantile(quantile) as f64 / 1e3;
        let recent = RecentLatencies { p50_ms: ms(0.5), p99_ms: ms(0.99) };
        self.unseen_us.reset();
        Some(recent)
    }

    fn window(&mut self, now: Timestamp) -> &mut Window {
        let age = now.since(self.began);
        if age >= WINDOW {
            std::mem::swap(&mut self.current, &mut self.previous);
            self.current.clear();
            self.previous_began = self.began;
            if age >= WINDOW * 2 {
                self.previous.clear();
                self.previous_began = now;
            }
            self.began = now;
        }
        &mut self.current
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipeline::Total;

    fn at(seconds: u64) -> Timestamp {
        Timestamp::after_origin(Duration::from_secs(seconds))
    }

    fn answered_after(ms: u64) -> RequestTimes {
        RequestTimes {
            latency: Duration::from_millis(ms),
            receiving: Duration::ZERO,
            until_sent: Duration::from_millis(2),
            copy_in: Duration::ZERO,
            execution: Duration::from_millis(5),
            copy_out: Duration::ZERO,
            writing: Duration::ZERO,
        }
    }

    #[test]
    fn a_client_that_cancels_a_late_request_does_not_hide_the_miss() {
        let slo = SloTarget { latency: Duration::from_millis(20), percentile: 75.0 };
        let mut stats = Stats::new(slo, at(0));
        let ms = Duration::from_millis;
        stats.count_failure(ms(15), at(1));
        stats.count_cancellation(ms(20), at(1));
        stats.count_cancellation(ms(19), at(1));
        stats.count_success(&answered_after(10), at(1));
        assert_eq!(stats.latencies(at(1)).attainment, 1.0 / 3.0);
        assert_eq!((stats.counts.failed, stats.counts.cancelled), (1, 2));
    }

    #[test]
    fn invalid_requests_are_not_misses() {
        let mut stats = Stats::new(SloTarget { latency: Duration::from_millis(20), percentile: 75.0 }, at(0));
        stats.count_success(&answered_after(10), at(1));
        stats.count_invalid(Duration::from_millis(30));
        stats.count_refusal(CountedRefusal::TooLarge, Duration::ZERO, at(1));
        assert_eq!(stats.latencies(at(1)).attainment, 1.0);
        assert_eq!((stats.counts.invalid, stats.counts.failed, stats.counts.rejected), (2, 0, 0));
        assert_eq!(stats.totals.fail.count, 2);
    }

    #[test]
    fn recent_latencies_cover_the_answers_since_the_previous_read() {
        let mut stats = Stats::new(SloTarget { latency: Duration::from_millis(20), percentile: 75.0 }, at(0));
        assert_eq!(stats.take_recent_latencies(), None);
        (0..99).for_each(|_| stats.count_success(&answered_after(10), at(1)));
        stats.count_success(&answered_after(300), at(1));
        let near = |take_recent_latencies: RecentLatencies, p50: f64, p99: f64| {
            assert!(
                (take_recent_latencies.p50_ms / p50 - 1.0).abs() < 0.01
                    && (take_recent_latencies.p99_ms / p99 - 1.0).abs() < 0.01
            );
        };
        near(stats.take_recent_latencies().unwrap(), 10.0, 10.0);
        stats.count_success(&answered_after(300), at(2));
        near(stats.take_recent_latencies().unwrap(), 300.0, 300.0);
        assert_eq!(stats.take_recent_latencies(), None);
    }

    #[test]
    fn the_rate_covers_the_known_time_and_forgets_old_windows() {
        let mut stats =
            Stats::new(SloTarget { latency: Duration::from_millis(20), percentile: 99.0 }, at(10));
        stats.count_success(&answered_after(10), at(10));
        assert_eq!(stats.latencies(at(10)).rate, 1.0, "a rate covers a second at least");
        stats.count_refusal(CountedRefusal::Late, Duration::ZERO, at(11));
        assert_eq!(stats.latencies(at(14)).rate, 0.5);
        stats.count_failure(Duration::ZERO, at(90));
        assert_eq!(stats.latencies(at(90)).rate, 3.0 / 80.0);
        assert_eq!(stats.latencies(at(160)).rate, 1.0 / 70.0, "the first window is gone");
        assert_eq!(stats.latencies(at(400)).rate, 0.0);
    }

    #[test]
    fn attainment_counts_refused_requests_and_forgets_old_windows() {
        let slo = SloTarget { latency: Duration::from_millis(20), percentile: 75.0 };
        let mut stats = Stats::new(slo, at(0));
        assert_eq!(stats.latencies(at(0)).attainment, 1.0);
        assert_eq!(stats.latencies(at(0)).slo_percentile_ms, None);
        stats.count_success(&answered_after(10), at(1));
        stats.count_success(&answered_after(30), at(1));
        stats.count_refusal(CountedRefusal::Late, Duration::from_millis(5), at(2));
        stats.count_failure(Duration::from_millis(7), at(2));
        stats.count_refusal(CountedRefusal::Late, Duration::ZERO, at(2));
        stats.count_cancellation(Duration::from_millis(1), at(2));
        assert_eq!(stats.latencies(at(3)).attainment, 0.2);
        assert_eq!(stats.totals.fail, Total { count: 4, time: Duration::from_millis(13) });
        let slow = stats.latencies(at(3)).slo_percentile_ms.unwrap();
        assert!((slow - 30.0).abs() < 0.5, "{slow}");
        stats.count_success(&answered_after(10), at(70));
        assert_eq!(stats.latencies(at(70)).attainment, 2.0 / 6.0);
        assert_eq!(stats.latencies(at(300)).attainment, 1.0);
        assert_eq!((stats.counts.succeeded, stats.counts.within_slo), (3, 2));
        assert_eq!(stats.totals.latency.count(), 3);
        assert_eq!(stats.counts.refused.by_reason().find(|(name, _)| *name == "late"), Some(("late", 2)));
    }
}
