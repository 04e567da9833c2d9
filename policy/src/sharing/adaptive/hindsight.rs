//! What a share that shrank shows: that it was needed.
//!
//! It was where the model's clients wait for an answer before they ask again. The demand of such a closed loop is what it gets: with
//! less each answer takes longer, so less is asked for, and a share that follows the demand follows itself. Then fewer requests
//! come, and by Little's law as many as before are under way. Where clients ask whenever they want, as many come as before,
//! and more are under way.
//!
//! And it was where of as many requests far more miss the SLO: a share carries a demand by mean times, which is not enough where times
//! vary, as on a GPU whose kernels queue behind others'.

use std::collections::VecDeque;

use shadowslice_shared::units::{Moment, Sms};

use super::super::{Live, Seen};
use super::chance::surplus;

/// Intervals that are compared, before a share shrank and after.
const COMPARED: usize = 8;

/// A closed loop asks less than this part of what it asked before, if the share mattered to it,
const LESS: f64 = 0.95;

/// by more standard deviations than chance explains,
const CHANCE: f64 = 2.5;

/// with as many requests under way, give or take this part.
const AS_MANY: f64 = 0.2;

/// So many times as many miss the SLO as before, or as may,
const WORSE: f64 = 2.0;

/// and more than chance explains, of not more requests than this many times as many,
const NO_MORE: f64 = 1.1;

/// after so many intervals or more: the first has what the hand-over left.
const TOLD_AFTER: usize = 2;

/// What came in some intervals.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Came {
    seconds: f64,
    requests: f64,
    /// Those that missed the SLO.
    missed: f64,
    /// The sum of the answers' latencies, in seconds.
    latencies: f64,
}

impl Came {
    pub(super) fn of(seen: &Seen) -> Self {
        Self {
            seconds: seen.span.as_secs_f64(),
            requests: seen.arrived as f64,
            missed: seen.missed() as f64,
            latencies: seen.answered as f64 * seen.mean_latency.as_secs_f64(),
        }
    }

    /// Both, one after the other.
    pub(super) fn and(self, other: Self) -> Self {
        Self {
            seconds: self.seconds + other.seconds,
            requests: self.requests + other.requests,
            missed: self.missed + other.missed,
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

/// Watches one model's shares.
#[derive(Debug, Clone, Default)]
pub(super) struct Hindsight {
    /// The share, and since when.
    share: Option<(Sms, Moment)>,
    /// The last intervals at that share.
    recent: VecDeque<Came>,
    /// Those at a larger one before.
    before: Option<Came>,
}

impl Hindsight {
    /// Learns from an interval, whose arrivals have this dispersion, and of which this part may miss the SLO. True once a share that
    /// shrank has shown that it was needed.
    pub(super) fn observe(&mut self, live: &Live, dispersion: f64, may_miss: f64) -> bool {
        if self.share != Some((live.share, live.since)) {
            self.changed(live);
            return false;
        }
        self.recent.push_back(Came::of(&live.seen));
        if self.recent.len() > COMPARED {
            self.recent.pop_front();
        }
        let Some(before) = &self.before else { return false };
        let (intervals, after) = (self.recent.len(), self.recently());
        let needed = intervals >= TOLD_AFTER && misses_more(before, &after, may_miss)
            || intervals == COMPARED && asks_less(before, &after, dispersion);
        if needed || intervals == COMPARED {
            self.before = None;
        }
        needed
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

/// Whether of as many requests more missed the SLO than before and than may.
fn misses_more(before: &Came, after: &Came, may_miss: f64) -> bool {
    let expected = (before.missed / before.requests.max(1.0)).max(may_miss) * after.requests;
    let surely = after.missed > WORSE * expected + surplus(expected);
    surely && after.rate() <= NO_MORE * before.rate()
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
        let mut clients = Hindsight::default();
        let mut at = |sms: u32, since: u64, (rate, ms): (u64, u64)| {
            let (arrived, mean_latency) = (rate / 2, Duration::from_millis(ms));
            let span = Duration::from_millis(500);
            let seen = Seen { span, arrived, answered: arrived, mean_latency, ..Seen::default() };
            let live =
                Live { since: Moment::after_origin(Duration::from_secs(since)), seen, ..live(Sms(sms)) };
            (0..=COMPARED).filter(|_| clients.observe(&live, 1.0, 0.01)).count()
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

    /// After how many intervals a share that shrank is missed, if so many of a hundred requests missed the SLO before, and then of so many.
    fn missed_after(before: u64, after: u64, of: u64) -> Option<usize> {
        let mut hindsight = Hindsight::default();
        let mut at = |sms: u32, refused: u64, arrived: u64| {
            let (span, since) = (Duration::from_millis(500), Moment::after_origin(Duration::from_secs(9)));
            let (answered, mean_latency) = (arrived - refused, Duration::from_millis(5));
            let seen =
                Seen { span, arrived, answered, in_time: answered, refused, mean_latency, ..Seen::default() };
            let live = Live { since, seen, ..live(Sms(sms)) };
            (0..2 * COMPARED).position(|_| hindsight.observe(&live, 1.0, 0.01))
        };
        assert_eq!(at(132, before, 100), None);
        at(40, after, of)
    }

    #[test]
    fn a_share_is_missed_where_more_miss_the_slo_without_it() {
        assert_eq!(missed_after(0, 9, 100), Some(2));
        assert_eq!(missed_after(2, 9, 100), Some(2));
        assert_eq!(missed_after(0, 4, 100), Some(3), "the less it is the longer it takes");
        assert_eq!(missed_after(5, 9, 100), None, "it was not much better");
        assert_eq!(missed_after(0, 2, 100), None, "as many may");
        assert_eq!(missed_after(0, 30, 120), None, "more came");
    }

    #[test]
    fn bursts_are_believed_less() {
        let came = |rate: f64, latency: f64| Came {
            seconds: 4.0,
            requests: rate * 4.0,
            missed: 0.0,
            latencies: rate * latency * 4.0,
        };
        let (before, after) = (came(600.0, 0.010), came(540.0, 0.011));
        assert!(asks_less(&before, &after, 1.0) && !asks_less(&before, &after, 4.0));
    }
}
