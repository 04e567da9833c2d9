//! What became of a model's requests of late.

use std::collections::VecDeque;
use std::time::Duration;

use shadowslice_shared::units::Moment;

use super::super::Seen;

/// How far back it goes: long enough for chance to show as such, and short enough that a change shows.
pub(super) const SPAN: Duration = Duration::from_secs(1);

/// So many standard deviations beyond what may miss are no chance, nor are so many requests.
const DEVIATIONS: f64 = 3.0;
const REQUESTS: f64 = 3.0;

/// Requests that ended over the last [`SPAN`].
#[derive(Debug, Clone, Default)]
pub(super) struct Window {
    parts: VecDeque<Part>,
}

#[derive(Debug, Clone, Copy)]
struct Part {
    at: Moment,
    span: Duration,
    ended: u64,
    missed: u64,
}

impl Window {
    /// Adds what was seen up to `now`.
    pub(super) fn add(&mut self, seen: &Seen, now: Moment) {
        self.parts.push_back(Part {
            at: now,
            span: seen.span,
            ended: seen.answered + seen.refused,
            missed: seen.missed(),
        });
        while self.parts.front().is_some_and(|part| now.since(part.at) >= SPAN) {
            self.parts.pop_front();
        }
    }

    /// Forgets all, as it was under other conditions.
    pub(super) fn clear(&mut self) {
        self.parts.clear();
    }

    pub(super) fn ended(&self) -> u64 {
        self.parts.iter().map(|part| part.ended).sum()
    }

    /// The part of the requests that missed, 0 to 1.
    pub(super) fn missed(&self) -> f64 {
        let missed: u64 = self.parts.iter().map(|part| part.missed).sum();
        missed as f64 / self.ended().max(1) as f64
    }

    /// Requests that missed in a second.
    pub(super) fn missed_per_s(&self) -> f64 {
        let span: Duration = self.parts.iter().map(|part| part.span).sum();
        self.missed() * self.ended() as f64 / span.as_secs_f64().max(f64::MIN_POSITIVE)
    }

    /// Whether more missed than the part that may, and not by chance.
    pub(super) fn is_short(&self, may_miss: f64) -> bool {
        let ended = self.ended() as f64;
        let expected = may_miss * ended;
        self.missed() * ended > expected + DEVIATIONS * expected.sqrt() + REQUESTS
    }
}
