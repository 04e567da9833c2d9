//! Whether waits for company cost requests.
//!
//! A lane that waits stands idle meanwhile. Requests that come when they want to execute later for it, in larger batches; clients that wait
//! for their answers ask less. There are as many of those as requests are under way at most, again and again. Where that is so, and lanes stand
//! idle for much of the time, batches do without waits for a moment, to see whether more comes then.

use shadowslice_shared::units::{Moment, Sms};

use super::super::{Live, Seen};
use super::hindsight::{Came, asks_less};
use super::lasting::Lasting;

/// A lane that waits for less than this part of the time costs next to nothing.
const IDLE: f64 = 0.05;

/// Intervals in a row in which lanes must stand idle with as many requests under way at most, before batches do without waits; for no
/// more than as many.
const COMPARED: u32 = 8;

/// After so many it is enough if not more comes, by this factor.
const FEWEST: u32 = 2;
const MORE: f64 = 1.05;

/// What came in some intervals.
#[derive(Debug, Clone, Copy, Default)]
struct Record {
    intervals: u32,
    came: Came,
    /// The most that were under way in the last of them.
    most: usize,
}

impl Record {
    fn and(self, seen: &Seen) -> Self {
        Self { intervals: self.intervals + 1, came: self.came.and(Came::of(seen)), most: seen.most_under_way }
    }

    /// The same, unless this one differs: then it is the first.
    fn and_alike(self, seen: &Seen) -> Self {
        let alike = self.intervals == 0 || self.most == seen.most_under_way;
        if alike { self.and(seen) } else { Self::default().and(seen) }
    }
}

#[derive(Debug, Clone, Copy)]
enum State {
    /// Batches may wait, and that has kept the lane idle.
    Waits(Record),
    /// They do not, to see what comes then beside what came when they did.
    Tries { with: Record, without: Record },
    /// What comes does not depend on it; they may wait for so many seconds before that is looked at again.
    Free { left_s: f64 },
    /// Less is asked for if they do; they do not for so many seconds.
    Costs { left_s: f64 },
}

/// Watches what waits cost one model.
#[derive(Debug, Clone)]
pub(super) struct Idling {
    state: State,
    /// The share in force, and since when: another one begins anew.
    share: Option<(Sms, Moment)>,
    lasting: Lasting,
}

impl Default for Idling {
    fn default() -> Self {
        Self { state: State::Waits(Record::default()), share: None, lasting: Lasting::default() }
    }
}

impl Idling {
    /// Learns from an interval, whose arrivals have this dispersion.
    pub(super) fn observe(&mut self, live: &Live, dispersion: f64) {
        let span_s = live.seen.span.as_secs_f64();
        self.lasting.age(span_s);
        let share = Some((live.share, live.since));
        let changed = self.share != share;
        self.share = share;
        self.state = match self.state {
            State::Waits(_) | State::Tries { .. } if changed => State::Waits(Record::default()),
            State::Waits(with) => {
                let idle = live.seen.waits.idle.as_secs_f64() > IDLE * span_s;
                let with = if idle { with.and_alike(&live.seen) } else { Record::default() };
                if with.intervals < COMPARED {
                    State::Waits(with)
                } else {
                    State::Tries { with, without: Record::default() }
                }
            }
            State::Tries { with, without } => self.tried(with, without.and(&live.seen), dispersion),
            State::Free { left_s } if left_s > span_s => State::Free { left_s: left_s - span_s },
            State::Costs { left_s } if left_s > span_s => State::Costs { left_s: left_s - span_s },
            State::Free { .. } | State::Costs { .. } => State::Waits(Record::default()),
        };
    }

    fn tried(&mut self, with: Record, without: Record, dispersion: f64) -> State {
        let as_few = without.came.rate() < MORE * with.came.rate();
        if asks_less(&without.came, &with.came, dispersion) {
            State::Costs { left_s: self.lasting.again() }
        } else if without.intervals >= COMPARED || without.intervals >= FEWEST && as_few {
            State::Free { left_s: self.lasting.again() }
        } else {
            State::Tries { with, without }
        }
    }

    /// Whether batches may wait.
    pub(super) fn lets_wait(&self) -> bool {
        matches!(self.state, State::Waits(_) | State::Free { .. })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::super::fixtures::live;
    use super::*;
    use crate::batcher::Waits;

    const SPAN: Duration = Duration::from_millis(500);

    /// Half a second in which so many requests came and had such a latency in ms, 24 at a time at most, while the lane waited for that
    /// part of it.
    fn interval(arrived: u64, ms: f64, idle: f64) -> Live {
        let waits = Waits { idle: SPAN.mul_f64(idle), ..Waits::default() };
        let mean_latency = Duration::from_secs_f64(ms / 1e3);
        let (answered, most_under_way) = (arrived, 24);
        let seen =
            Seen { span: SPAN, arrived, answered, most_under_way, mean_latency, waits, ..Seen::default() };
        Live { seen, ..live(Sms(100)) }
    }

    /// In how many of some intervals batches wait of a model of which that is true if they do, and if they do not.
    fn waits(intervals: u32, with: (u64, f64, f64), without: (u64, f64)) -> u32 {
        let mut idling = Idling::default();
        let next = |idling: &mut Idling| {
            let (arrived, ms, idle) = if idling.lets_wait() { with } else { (without.0, without.1, 0.0) };
            idling.observe(&interval(arrived, ms, idle), 1.0);
            u32::from(idling.lets_wait())
        };
        (0..intervals).map(|_| next(&mut idling)).sum()
    }

    #[test]
    fn clients_that_ask_less_are_not_kept_waiting() {
        // Twenty-four clients.
        let (with, without) = ((1_070, 11.2, 0.25), (1_340, 8.9));
        assert_eq!(waits(100, with, without), 8);
        // It is found out within an interval, and lasts for two minutes.
        assert_eq!(waits(10 + 239, with, without), 8);
        assert_eq!(waits(10 + 240 + 60, with, without), 8 + 8);
    }

    #[test]
    fn who_asks_when_he_wants_is_kept_waiting() {
        assert_eq!(waits(100, (150, 8.0, 0.5), (150, 5.0)), 98, "but for a second");
        assert_eq!(waits(100, (1_070, 11.0, 0.25), (1_340, 13.0)), 92, "more are under way: another load");
        assert_eq!(waits(100, (1_070, 11.2, 0.05), (1_340, 8.9)), 100, "so little costs nothing");
        assert_eq!(waits(100, (0, 0.0, 0.0), (0, 0.0)), 100);
    }

    #[test]
    fn requests_that_are_now_more_now_fewer_at_a_time_are_no_clients_that_wait() {
        let mut idling = Idling::default();
        for n in 0..100 {
            let mut with = interval(1_070, 11.2, 0.25);
            with.seen.most_under_way = 24 + n / 7 % 2;
            idling.observe(&with, 1.0);
            assert!(idling.lets_wait());
        }
    }

    #[test]
    fn another_share_begins_anew() {
        let mut idling = Idling::default();
        let (mut with, without) = (interval(1_070, 11.2, 0.25), interval(1_340, 8.9, 0.0));
        (0..9).for_each(|_| idling.observe(&with, 1.0));
        assert!(!idling.lets_wait());
        with.share = Sms(50);
        idling.observe(&Live { share: Sms(50), ..without }, 1.0);
        assert!(idling.lets_wait(), "the share may have made the difference");
        (0..7).for_each(|_| idling.observe(&with, 1.0));
        assert!(idling.lets_wait());
    }

    #[test]
    fn a_day_later_it_begins_anew() {
        let mut idling = Idling::default();
        (0..7).for_each(|_| _ = idling.lasting.again());
        let seen = Seen { span: Duration::from_secs(86_400), ..Seen::default() };
        idling.observe(&Live { seen, ..live(Sms(100)) }, 1.0);
        assert_eq!(idling.lasting.again(), 120.0);
    }
}
