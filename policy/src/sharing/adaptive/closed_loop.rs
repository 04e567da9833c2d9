//! Whether a model's clients wait for an answer before they ask again.
//!
//! The demand of such a closed loop is what it gets: with less each answer takes longer, so less is asked for, and a share that follows
//! the demand follows itself. A share that shrinks tells: then fewer requests come, and by Little's law as many as before are
//! under way. Where clients ask whenever they want, as many come as before, and more are under way.

use std::collections::VecDeque;

use shadowslice_shared::units::{Moment, Sms};

use super::super::{Live, Seen};

/// Intervals that are compared, before a share shrank and after.
const COMPARED: usize = 8;

/// A closed loop asks less than this part of what it asked before, if the share mattered to it,
const LESS: f64 = 0.95;

/// by more standard deviations than chance explains,
const CHANCE: f64 = 2.5;

/// with as many requests under way, give or take this part.
const AS_MANY: f64 = 0.2;

/// What came in some intervals.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Came {
    seconds: f64,
    requests: f64,
    /// The sum of the answers' latencies, in seconds.
    latencies: f64,
}

impl Came {
    pub(super) fn of(seen: &Seen) -> Self {
        Self {
            seconds: seen.span.as_secs_f64(),
            requests: seen.arrived as f64,
            latencies: seen.answered as f64 * seen.mean_latency.as_secs_f64(),
        }
    }

    /// Both, one after the other.
    pub(super) fn and(self, other: Self) -> Self {
        Self {
            seconds: self.seconds + other.seconds,
            requests: self.requests + other.requests,
            latencies: self.latencies + other.latencies,
        }
    }

    /// Requests a second.
    pub(super) fn rate(&self) -> f64 {
        self.requests / self.seconds
    }

    /// Requests under way.
    fn under_way(&self) -> f64 {
        self.latencies / self.seconds
    }
}

/// Watches one model's clients.
#[derive(Debug, Clone, Default)]
pub(super) struct ClosedLoop {
    /// The share, and since when.
    share: Option<(Sms, Moment)>,
    /// The last intervals at that share.
    recent: VecDeque<Came>,
    /// Those at a larger one before.
    before: Option<Came>,
}

impl ClosedLoop {
    /// Learns from an interval, whose arrivals have this dispersion. True once a share that shrank has shown that clients wait.
    pub(super) fn observe(&mut self, live: &Live, dispersion: f64) -> bool {
        if self.share != Some((live.share, live.since)) {
            self.changed(live);
            return false;
        }
        self.recent.push_back(Came::of(&live.seen));
        if self.recent.len() > COMPARED {
            self.recent.pop_front();
        }
        if self.recent.len() < COMPARED {
            return false;
        }
        let after = self.recently();
        self.before.take().is_some_and(|before| asks_less(&before, &after, dispersion))
    }

    /// The share is another one. The interval in which it changed belongs to neither.
    fn changed(&mut self, live: &Live) {
        let known = self.recent.len() == COMPARED && self.share.is_some_and(|(share, _)| live.share < share);
        self.before = known.then(|| self.recently());
        self.share = Some((live.share, live.since));
        self.recent.clear();
    }

    fn recently(&self) -> Came {
        self.recent.iter().fold(Came::default(), |sum, came| sum.and(*came))
    }
}

/// Whether less was asked for after something became worse, and by as many: by clients that wait for their answers.
pub(super) fn asks_less(before: &Came, after: &Came, dispersion: f64) -> bool {
    let rate = (before.requests + after.requests) / (before.seconds + after.seconds);
    let chance = (dispersion * rate * (1.0 / before.seconds + 1.0 / after.seconds)).sqrt();
    let fell = before.rate() - after.rate();
    let as_many = (after.under_way() - before.under_way()).abs() <= AS_MANY * before.under_way();
    after.rate() < LESS * before.rate() && fell > CHANCE * chance && as_many
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::super::fixtures::live;
    use super::*;

    /// Whether clients seem to wait of whom so many asked a second before their share shrank and after, with these latencies in ms.
    fn seems(before: (u64, u64), after: (u64, u64), shares: (u32, u32)) -> bool {
        let mut clients = ClosedLoop::default();
        let mut at = |sms: u32, since: u64, (rate, ms): (u64, u64)| {
            let (arrived, mean_latency) = (rate / 2, Duration::from_millis(ms));
            let span = Duration::from_millis(500);
            let seen = Seen { span, arrived, answered: arrived, mean_latency, ..Seen::default() };
            let live =
                Live { since: Moment::after_origin(Duration::from_secs(since)), seen, ..live(Sms(sms)) };
            (0..=COMPARED).filter(|_| clients.observe(&live, 1.0)).count()
        };
        at(shares.0, 1, before) + at(shares.1, 9, after) > 0
    }

    #[test]
    fn who_asks_less_and_has_as_many_under_way_waits_for_answers() {
        assert!(seems((600, 10), (480, 12), (132, 40)));
        assert!(!seems((600, 10), (600, 10), (132, 40)), "it did not matter");
        assert!(!seems((600, 10), (600, 14), (132, 40)), "they ask whenever they want");
        assert!(!seems((600, 10), (300, 11), (132, 40)), "fewer want something");
        assert!(!seems((10, 400), (8, 500), (132, 40)), "so little is chance");
        assert!(!seems((600, 10), (480, 12), (40, 132)), "it grew");
        assert!(!seems((0, 0), (0, 0), (132, 40)));
    }

    #[test]
    fn bursts_are_believed_less() {
        let came = |rate: f64, latency: f64| Came {
            seconds: 4.0,
            requests: rate * 4.0,
            latencies: rate * latency * 4.0,
        };
        let (before, after) = (came(600.0, 0.010), came(540.0, 0.011));
        assert!(asks_less(&before, &after, 1.0) && !asks_less(&before, &after, 4.0));
    }
}
