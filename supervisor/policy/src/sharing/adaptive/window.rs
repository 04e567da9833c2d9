//! How many of a model's recent requests missed, and what its batches took.

use std::collections::VecDeque;
use std::time::Duration;

use shadowslice_shared::units::Moment;

use super::super::{Executed, Seen};
use super::score::Misses;

/// Where many requests miss, a change shows at once.
pub(super) const SPAN: Duration = Duration::from_secs(1);

/// For where few requests miss or few arrive.
pub(super) const LONG: Duration = Duration::from_secs(10);

/// So many requests are enough to say what part of them misses.
const FEW: u64 = 30;

/// More misses than allowed are no chance beyond so many standard deviations and so many requests.
const DEVIATIONS: f64 = 3.0;
const REQUESTS: f64 = 3.0;

/// One of so many batches may be long by accident: on a busy host a worker waits, which says
/// nothing of the GPU.
const BATCHES: u64 = 10;

/// Requests per second, and the standard deviation of that number if they arrive by chance.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Rate {
    pub(super) per_s: f64,
    pub(super) deviation: f64,
}

#[derive(Debug, Clone, Default)]
pub(super) struct Window {
    parts: VecDeque<Interval>,
}

#[derive(Debug, Clone)]
struct Interval {
    at: Moment,
    span: Duration,
    arrived: u64,
    ended: u64,
    missed: u64,
    executed: Vec<Executed>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Sum {
    span: Duration,
    arrived: u64,
    ended: u64,
    missed: u64,
}

impl Window {
    pub(super) fn add(&mut self, seen: &Seen, now: Moment) {
        let (ended, missed) = (seen.answered + seen.refused, seen.missed());
        let (span, executed) = (seen.span, seen.executed.clone());
        self.parts.push_back(Interval { at: now, span, arrived: seen.arrived, ended, missed, executed });
        while self.parts.front().is_some_and(|part| now.since(part.at) >= LONG) {
            self.parts.pop_front();
        }
    }

    /// What was seen was under other conditions.
    pub(super) fn clear(&mut self) {
        self.parts.clear();
    }

    /// Of the longest batches of the last [`SPAN`]; accidents are left out.
    pub(super) fn two_batches(&self) -> Duration {
        let executed = self.last(SPAN).flat_map(|part| &part.executed);
        let mut sizes: Vec<(Duration, u64)> =
            executed.map(|executed| (executed.mean, executed.count)).collect();
        sizes.sort_unstable_by(|one, other| other.cmp(one));
        let accidents = sizes.iter().map(|(_, count)| count).sum::<u64>() / BATCHES;
        let mut longer = 0;
        let longest = sizes.into_iter().find(|(_, count)| {
            longer += count;
            longer > accidents
        });
        2 * longest.map_or(Duration::ZERO, |(mean, _)| mean)
    }

    /// The part of the last [`SPAN`] in which batches executed, as the worker measured them:
    /// without the time in which the worker waits for the host's processor.
    pub(super) fn busy(&self) -> f64 {
        let executed = self.last(SPAN).flat_map(|part| &part.executed);
        let executed: f64 =
            executed.map(|executed| executed.mean.as_secs_f64() * executed.count as f64).sum();
        executed / self.over(SPAN).span.as_secs_f64().max(f64::MIN_POSITIVE)
    }

    /// A part of the requests, 0 to 1.
    pub(super) fn missed(&self) -> f64 {
        let Sum { ended, missed, .. } = self.telling();
        missed as f64 / ended.max(1) as f64
    }

    /// Returns the requests that ended and those that missed since the window was cleared, over the
    /// last [`LONG`] at most.
    pub(super) fn misses(&self) -> Misses {
        let Sum { ended, missed, .. } = self.over(LONG);
        Misses { ended, missed }
    }

    /// Returns how many requests arrived per second over the last [`SPAN`].
    pub(super) fn rate(&self) -> Rate {
        let Sum { span, arrived, .. } = self.over(SPAN);
        let seconds = span.as_secs_f64().max(f64::MIN_POSITIVE);
        Rate { per_s: arrived as f64 / seconds, deviation: (arrived as f64).sqrt() / seconds }
    }

    /// More requests missed than may, and not by chance.
    pub(super) fn is_violating(&self, may_miss: f64) -> bool {
        [SPAN, LONG].into_iter().map(|span| self.over(span)).any(|Sum { ended, missed, .. }| {
            let expected = may_miss * ended as f64;
            missed as f64 > expected + DEVIATIONS * expected.sqrt() + REQUESTS
        })
    }

    /// So few requests missed since the window was cleared that the objective is likely kept.
    pub(super) fn keeps(&self, may_miss: f64) -> bool {
        let Sum { ended, missed, .. } = self.over(LONG);
        let expected = may_miss * ended as f64;
        missed as f64 <= expected + expected.sqrt() + 1.0
    }

    /// The last [`SPAN`], or the last [`LONG`] if few requests ended in that.
    fn telling(&self) -> Sum {
        let short = self.over(SPAN);
        if short.ended < FEW { self.over(LONG) } else { short }
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
