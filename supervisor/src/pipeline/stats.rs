//! Counts and latencies of one model.

use std::time::Duration;

use hdrhistogram::Histogram;
use shadowslice_shared::units::Moment;

use super::durations::{Durations, Spent};
use super::histogram::LatencyHistogram;
use super::observe::Observer;
use super::settle::SettleMeter;

/// How long a window of latencies lasts; percentiles cover between one and two of them.
const WINDOW: Duration = Duration::from_secs(60);

/// The longest latency told apart, in microseconds: an hour.
const LONGEST_US: u64 = 3_600_000_000;

/// Why a request is turned away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// The model takes no requests.
    NotReady,
    /// As many requests wait as may.
    QueueFull,
    /// The memory for requests is taken.
    MemoryFull,
    /// It would never fit into that memory.
    TooLarge,
    /// The policy lets in only a part of the requests, and it is none of them.
    Door,
    /// It cannot be answered in time, or its time is up.
    Late,
}

impl Refusal {
    const NAMES: [&'static str; 6] = ["not_ready", "queue_full", "memory_full", "too_large", "door", "late"];
}

/// What became of the requests since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Taken into the queue.
    pub accepted: u64,
    /// Answered.
    pub succeeded: u64,
    /// Answered within the SLO.
    pub within_slo: u64,
    /// Accepted, and failed.
    pub failed: u64,
    /// Turned away, at the door or out of the queue.
    pub rejected: u64,
    refused: [u64; Refusal::NAMES.len()],
    /// Put back into the queue after a worker's death or a hand-over's timeout.
    pub retried: u64,
    /// Given up by their clients before they ran.
    pub cancelled: u64,
    /// Batches answered.
    pub batches: u64,
}

impl Counts {
    /// Of the rejected, how many for each reason, all reasons included.
    pub fn refused(&self) -> impl Iterator<Item = (&'static str, u64)> {
        Refusal::NAMES.into_iter().zip(self.refused)
    }
}

/// A summary of latencies, from acceptance to answer, over the last minute or two.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Latencies {
    /// Median, in ms.
    pub p50_ms: f64,
    /// 99th percentile, in ms.
    pub p99_ms: f64,
    /// Answered within the SLO / offered; 1 when nothing was offered.
    pub attainment: f64,
}

/// One model's running statistics.
#[derive(Debug)]
pub(crate) struct Stats {
    pub(crate) counts: Counts,
    pub(crate) histogram: LatencyHistogram,
    pub(crate) durations: Durations,
    /// What the sharing policy looks at.
    pub(crate) recent: Observer,
    pub(crate) settle: SettleMeter,
    slo: Duration,
    began: Moment,
    current: Window,
    previous: Window,
}

#[derive(Debug)]
struct Window {
    latency_us: Histogram<u32>,
    offered: u64,
    within: u64,
}

impl Window {
    fn new() -> Self {
        let latency_us =
            Histogram::new_with_max(LONGEST_US, 2).expect("a constant range and precision that fit");
        Self { latency_us, offered: 0, within: 0 }
    }

    fn clear(&mut self) {
        self.latency_us.reset();
        self.offered = 0;
        self.within = 0;
    }
}

impl Stats {
    pub(crate) fn new(slo: Duration, now: Moment) -> Self {
        Self {
            counts: Counts::default(),
            histogram: LatencyHistogram::default(),
            durations: Durations::default(),
            recent: Observer::new(now),
            settle: SettleMeter::default(),
            slo,
            began: now,
            current: Window::new(),
            previous: Window::new(),
        }
    }

    /// A request was answered.
    pub(crate) fn succeeded(&mut self, spent: &Spent, now: Moment) {
        let latency = spent.latency;
        self.counts.succeeded += 1;
        self.durations.add(spent);
        self.histogram.record(latency);
        self.recent.answered(latency, latency <= self.slo);
        let window = self.window(now);
        window.latency_us.saturating_record(u64::try_from(latency.as_micros()).unwrap_or(LONGEST_US));
        window.offered += 1;
        if latency <= self.slo {
            self.current.within += 1;
            self.counts.within_slo += 1;
        } else {
            self.settle.missed(now);
        }
    }

    /// A request was accepted and failed.
    pub(crate) fn failed(&mut self, now: Moment) {
        self.counts.failed += 1;
        self.settle.missed(now);
        self.window(now).offered += 1;
    }

    /// A request was turned away as it came.
    pub(crate) fn turned_away(&mut self, why: Refusal, now: Moment) {
        self.recent.arrived();
        self.rejected(why, now);
    }

    /// A request was accepted.
    pub(crate) fn accepted(&mut self) {
        self.counts.accepted += 1;
        self.recent.arrived();
    }

    /// A request was turned away.
    pub(crate) fn rejected(&mut self, why: Refusal, now: Moment) {
        self.counts.rejected += 1;
        self.counts.refused[why as usize] += 1;
        self.recent.refused();
        self.settle.missed(now);
        self.window(now).offered += 1;
    }

    /// The last minute or two.
    pub(crate) fn latencies(&mut self, now: Moment) -> Latencies {
        self.window(now);
        let mut both = self.previous.latency_us.clone();
        both.add(&self.current.latency_us).expect("both have the same range");
        let offered = self.previous.offered + self.current.offered;
        let within = self.previous.within + self.current.within;
        let ms = |quantile| both.value_at_quantile(quantile) as f64 / 1e3;
        Latencies {
            p50_ms: ms(0.5),
            p99_ms: ms(0.99),
            attainment: if offered == 0 { 1.0 } else { within as f64 / offered as f64 },
        }
    }

    fn window(&mut self, now: Moment) -> &mut Window {
        let age = now.since(self.began);
        if age >= WINDOW {
            std::mem::swap(&mut self.current, &mut self.previous);
            self.current.clear();
            if age >= WINDOW * 2 {
                self.previous.clear();
            }
            self.began = now;
        }
        &mut self.current
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Moment {
        Moment::after_origin(Duration::from_secs(seconds))
    }

    fn answered_after(ms: u64) -> Spent {
        Spent {
            latency: Duration::from_millis(ms),
            copy_in: Duration::ZERO,
            execution: Duration::from_millis(5),
            copy_out: Duration::ZERO,
        }
    }

    #[test]
    fn attainment_counts_what_was_refused_and_forgets_old_windows() {
        let mut stats = Stats::new(Duration::from_millis(20), at(0));
        assert_eq!(stats.latencies(at(0)).attainment, 1.0);
        stats.succeeded(&answered_after(10), at(1));
        stats.succeeded(&answered_after(30), at(1));
        stats.rejected(Refusal::Late, at(2));
        stats.failed(at(2));
        assert_eq!(stats.latencies(at(3)).attainment, 0.25);
        stats.succeeded(&answered_after(10), at(70));
        assert_eq!(stats.latencies(at(70)).attainment, 0.4);
        assert_eq!(stats.latencies(at(300)).attainment, 1.0);
        assert_eq!((stats.counts.succeeded, stats.counts.within_slo), (3, 2));
        assert_eq!(stats.histogram.count(), 3);
        assert_eq!(stats.counts.refused().filter(|(_, count)| *count > 0).collect::<Vec<_>>(), [("late", 1)]);
    }
}
