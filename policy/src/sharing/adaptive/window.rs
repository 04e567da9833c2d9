//! What became of a model's requests of late.

use std::collections::VecDeque;
use std::time::Duration;

use shadowslice_shared::units::Moment;

use super::super::Seen;

/// How far back it goes: far enough for a change to show at once where much is missed,
pub(super) const SPAN: Duration = Duration::from_secs(1);

/// and where little is, or few requests come.
pub(super) const LONG: Duration = Duration::from_secs(10);

/// So many requests say what part of them misses.
const FEW: u64 = 30;

/// So many standard deviations beyond what may miss are no chance, nor are so many requests.
const DEVIATIONS: f64 = 3.0;
const REQUESTS: f64 = 3.0;

/// Requests that ended over the last [`LONG`].
#[derive(Debug, Clone, Default)]
pub(super) struct Window {
    parts: VecDeque<Part>,
}

/// What ended up to a moment, from the one before it on.
#[derive(Debug, Clone, Copy)]
struct Part {
    at: Moment,
    span: Duration,
    ended: u64,
    missed: u64,
}

/// What ended over a time.
#[derive(Debug, Clone, Copy, Default)]
struct Sum {
    span: Duration,
    ended: u64,
    missed: u64,
}

impl Window {
    /// Adds what was seen up to `now`.
    pub(super) fn add(&mut self, seen: &Seen, now: Moment) {
        let (ended, missed) = (seen.answered + seen.refused, seen.missed());
        self.parts.push_back(Part { at: now, span: seen.span, ended, missed });
        while self.parts.front().is_some_and(|part| now.since(part.at) >= LONG) {
            self.parts.pop_front();
        }
    }

    /// Forgets all, as it was under other conditions.
    pub(super) fn clear(&mut self) {
        self.parts.clear();
    }

    /// Requests that ended over the last [`SPAN`].
    pub(super) fn ended(&self) -> u64 {
        self.over(SPAN).ended
    }

    /// The part of the requests that missed, 0 to 1.
    pub(super) fn missed(&self) -> f64 {
        let Sum { ended, missed, .. } = self.telling();
        missed as f64 / ended.max(1) as f64
    }

    /// Requests that missed in a second, and the variance of that: they miss by chance.
    pub(super) fn missed_per_s(&self) -> (f64, f64) {
        let Sum { span, missed, .. } = self.telling();
        let seconds = span.as_secs_f64().max(f64::MIN_POSITIVE);
        (missed as f64 / seconds, missed as f64 / (seconds * seconds))
    }

    /// Whether more missed than the part that may, and not by chance.
    pub(super) fn is_short(&self, may_miss: f64) -> bool {
        [SPAN, LONG].into_iter().map(|span| self.over(span)).any(|Sum { ended, missed, .. }| {
            let expected = may_miss * ended as f64;
            missed as f64 > expected + DEVIATIONS * expected.sqrt() + REQUESTS
        })
    }

    /// The last [`SPAN`], or more of it where few requests ended in that.
    fn telling(&self) -> Sum {
        let short = self.over(SPAN);
        if short.ended < FEW { self.over(LONG) } else { short }
    }

    fn over(&self, span: Duration) -> Sum {
        let Some(last) = self.parts.back() else { return Sum::default() };
        let recent = self.parts.iter().rev().take_while(|part| last.at.since(part.at) < span);
        recent.fold(Sum::default(), |sum, part| Sum {
            span: sum.span + part.span,
            ended: sum.ended + part.ended,
            missed: sum.missed + part.missed,
        })
    }
}
