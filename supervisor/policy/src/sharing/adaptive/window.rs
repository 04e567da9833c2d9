//! The recent misses and batch times of a model.

use std::collections::VecDeque;
use std::time::Duration;

use shadowslice_shared::units::Timestamp;

use super::super::{BatchStats, Observation};
use super::score::Misses;

/// The length of the short window. If many requests miss, this window shows the change within a second.
pub(super) const SHORT: Duration = Duration::from_secs(1);

/// The length of the long window, for models with few requests or few misses.
pub(super) const LONG: Duration = Duration::from_secs(10);

/// The number of standard deviations by which misses can exceed their expected number by chance. The
/// same number of misses is added as a margin.
const CHANCE: f64 = 3.0;

/// The maximum relative difference between two request rates that count as the same load. The
/// difference that chance can explain is added.
const MAX_RATE_DIFFERENCE: f64 = 0.2;

/// The divisor of the number of batches that gives the number of ignored batches. A busy host may delay
/// up to one batch in 10, so the longest tenth of the batches is ignored.
const ACCIDENT_ONE_IN: u64 = 10;

/// A request rate per second, and its standard deviation if requests arrive at random.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ArrivalRate {
    pub(super) per_s: f64,
    pub(super) deviation: f64,
}

impl ArrivalRate {
    pub(super) fn is_like(self, other: Self) -> bool {
        let chance = CHANCE * self.deviation.hypot(other.deviation);
        (self.per_s - other.per_s).abs() <= MAX_RATE_DIFFERENCE * self.per_s.max(other.per_s) + chance
    }
}

/// The observations of a model over the last 10 s ([`LONG`]).
#[derive(Debug, Clone, Default)]
pub(super) struct ObservationWindow {
    parts: VecDeque<Interval>,
}

#[derive(Debug, Clone)]
struct Interval {
    at: Timestamp,
    span: Duration,
    arrived: u64,
    ended: u64,
    missed: u64,
    batches: Vec<BatchStats>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Sum {
    span: Duration,
    arrived: u64,
    ended: u64,
    missed: u64,
}

impl ObservationWindow {
    pub(super) fn add(&mut self, observation: &Observation, now: Timestamp) {
        let (ended, missed) = (observation.answered + observation.refused, observation.missed());
        let (span, batches) = (observation.span, observation.batches.clone());
        self.parts.push_back(Interval {
            at: now,
            span,
            arrived: observation.arrived,
            ended,
            missed,
            batches,
        });
        while self.parts.front().is_some_and(|part| now.since(part.at) >= LONG) {
            self.parts.pop_front();
        }
    }

    /// Discards all observations, because they were made under other conditions.
    pub(super) fn clear(&mut self) {
        self.parts.clear();
    }

    /// Returns twice the time of the longest batch of the last second ([`SHORT`]), after the longest
    /// tenth of the batches is removed.
    pub(super) fn two_batches(&self) -> Duration {
        let batches = self.last(SHORT).flat_map(|part| &part.batches);
        let mut sizes: Vec<(Duration, u64)> = batches.map(|size| (size.mean, size.count)).collect();
        sizes.sort_unstable_by(|one, other| other.cmp(one));
        let accidents = sizes.iter().map(|(_, count)| count).sum::<u64>() / ACCIDENT_ONE_IN;
        let mut longer = 0;
        let longest = sizes.into_iter().find(|(_, count)| {
            longer += count;
            longer > accidents
        });
        2 * longest.map_or(Duration::ZERO, |(mean, _)| mean)
    }

    /// Returns the fraction of the last second ([`SHORT`]) for which batches executed, as measured by
    /// the worker. This fraction excludes the time for which the worker waits for a CPU of the host.
    pub(super) fn busy(&self) -> f64 {
        let batches = self.last(SHORT).flat_map(|part| &part.batches);
        let busy_s: f64 = batches.map(|size| size.mean.as_secs_f64() * size.count as f64).sum();
        busy_s / self.over(SHORT).span.as_secs_f64().max(f64::MIN_POSITIVE)
    }

    /// Returns the fraction of the requests that missed, 0 to 1.
    pub(super) fn missed(&self) -> f64 {
        self.misses(LONG).part()
    }

    /// Returns the number of requests that ended, and the number of requests that missed. Counts the
    /// time since the window was cleared, but at most `over`.
    pub(super) fn misses(&self, over: Duration) -> Misses {
        let Sum { ended, missed, .. } = self.over(over);
        Misses { ended, missed }
    }

    /// Returns the arrival rate. Counts the time since the window was cleared, but at most `over`.
    pub(super) fn rate(&self, over: Duration) -> ArrivalRate {
        let Sum { span, arrived, .. } = self.over(over);
        let seconds = span.as_secs_f64().max(f64::MIN_POSITIVE);
        ArrivalRate { per_s: arrived as f64 / seconds, deviation: (arrived as f64).sqrt() / seconds }
    }

    /// Returns true if the window covers 10 s ([`LONG`]).
    pub(super) fn is_full(&self) -> bool {
        let first = self.parts.front().zip(self.parts.back());
        first.is_some_and(|(first, last)| last.at.since(first.at) + 2 * last.span >= LONG)
    }

    /// Returns true if a larger fraction of requests than `allowed` missed, and chance does not explain
    /// the difference.
    pub(super) fn is_violating(&self, allowed: f64) -> bool {
        [SHORT, LONG].into_iter().map(|span| self.over(span)).any(|Sum { ended, missed, .. }| {
            let expected = allowed * ended as f64;
            missed as f64 > expected + CHANCE * expected.sqrt() + CHANCE
        })
    }

    /// Returns true if so few requests missed since the window was cleared that the model probably
    /// meets its SLO.
    pub(super) fn keeps(&self, allowed: f64) -> bool {
        let Sum { ended, missed, .. } = self.over(LONG);
        let expected = allowed * ended as f64;
        missed as f64 <= expected + expected.sqrt() + 1.0
    }

    fn over(&self, span: Duration) -> Sum {
        self.last(span).fold(Sum::default(), |sum, part| Sum {
            span: sum.span + part.span,
            arrived: sum.arrived + part.arrived,
            ended: sum.ended + part.ended,
            missed: sum.missed + part.missed,
        })
    }

    fn last(&self, span: Duration) -> impl Iterator<Item = &Interval> {
        let until = self.parts.back().map(|part| part.at).unwrap_or_default();
        self.parts.iter().rev().take_while(move |part| until.since(part.at) < span)
    }
}
