//! Whether caps that do not fit onto a GPU together pay there.
//!
//! Where a GPU divides itself among those who execute, generous caps cost nobody anything, and SMs follow the demand from
//! batch to batch. Where kernels take turns instead, as on an H200 (docs/measurements/contention.md), short batches are kept
//! waiting by long ones, and SLOs are missed though there is room for everybody. Which of it a GPU does, only it can
//! tell: where SLOs are missed for no want of SMs, and batches take longer than neighbours explain, the other way is tried, and the better
//! one kept: better for the highest priority to which it makes a difference. What was missed for another reason, as in an outage, may look the
//! same, so that caps that fit are given up after a while, and come back if it was no such thing.

use std::collections::BTreeMap;

use super::super::Seen;
use super::chance::surplus;
use super::lasting::Lasting;
use super::tally::Tally;

/// Requests miss their SLOs for no want of SMs where all demand, in full batches, takes less than this part of the GPU.
const ROOM: f64 = 0.8;

/// Where batches take less than so many times as long as they should beside their neighbours, the GPU divides itself, and caps that
/// fit would only take from each what the others leave.
const SLOWED: f64 = 1.1;

/// This part of the requests of an interval must miss theirs,
const MISSED: f64 = 0.2;

/// of at least so many,
const REQUESTS: f64 = 20.0;

/// in so many intervals in a row, before the other way is tried.
const INTERVALS: u32 = 4;

/// Caps that fit must miss less than this part of what generous ones miss to be tried again. Generous ones are come back to if they miss
/// less at all: they cost nobody anything, if they do not cost time.
const BETTER: f64 = 0.7;

/// After so many intervals of caps that fit,
const TELLING: u32 = 8;

/// they are over if this part more of a priority's requests miss than with generous ones, and more than chance explains, whatever that does
/// for lower ones.
const WORSE: f64 = 0.01;

/// What an interval weighs after the next one.
const MEMORY: f64 = 0.99;

/// A way to share a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Caps {
    /// Everybody may have what the others leave.
    Generous,
    /// They fit onto the GPU together, and are less the lower the priority.
    Fitting,
}

impl Tally {
    fn fade(&mut self) {
        self.arrived *= MEMORY;
        self.missed *= MEMORY;
    }

    /// Whether clearly more missed theirs than in the other one; nobody knows where few came.
    fn missed_more_than(&self, other: &Self) -> bool {
        let expected = other.part() * self.arrived;
        let enough = self.arrived.min(other.arrived) >= REQUESTS;
        enough && self.missed > expected + surplus(expected) + WORSE * self.arrived
    }
}

/// What came of one way for each priority, while there was room.
#[derive(Debug, Clone, Default)]
struct Toll(BTreeMap<u32, Tally>);

impl Toll {
    fn fade(&mut self) {
        self.0.values_mut().for_each(Tally::fade);
    }

    fn add(&mut self, priority: u32, seen: Tally) {
        *self.0.entry(priority).or_default() += seen;
    }

    /// The part of all requests that missed its SLO.
    fn part(&self) -> f64 {
        let mut all = Tally::default();
        self.0.values().for_each(|&of| all += of);
        all.part()
    }

    /// Whether the highest priority to which it makes a difference misses more.
    fn is_worse_than(&self, other: &Self) -> bool {
        let both = self.0.iter().filter_map(|(priority, of)| Some((of, other.0.get(priority)?)));
        let mut verdicts = both.filter_map(|(here, there)| {
            let (worse, better) = (here.missed_more_than(there), there.missed_more_than(here));
            (worse || better).then_some(worse)
        });
        verdicts.next().unwrap_or(false)
    }
}

/// How one GPU is shared, and what came of it.
#[derive(Debug, Clone)]
pub(super) struct Regime {
    /// For how many seconds more caps fit; nothing while they are generous.
    fitting_s: Option<f64>,
    /// How long caps are to fit.
    lasting: Lasting,
    /// What came of the way in force,
    this_way: Toll,
    /// in so many intervals since it is,
    intervals: u32,
    /// and of the other one when that was.
    other_way: Toll,
    /// Intervals in a row that speak against the way in force.
    doubts: u32,
    /// Whether an interval is over. In the first one doors turned nobody away, which says nothing of caps.
    begun: bool,
}

impl Regime {
    pub(super) fn new() -> Self {
        Self {
            fitting_s: None,
            lasting: Lasting::default(),
            this_way: Toll::default(),
            intervals: 0,
            other_way: Toll::default(),
            doubts: 0,
            begun: false,
        }
    }

    /// The caps to share it with.
    pub(super) fn caps(&self) -> Caps {
        if self.fitting_s.is_some() { Caps::Fitting } else { Caps::Generous }
    }

    /// Whether it is still open whether caps that fit help.
    pub(super) fn is_tried(&self) -> bool {
        self.fitting_s.is_some() && self.intervals < TELLING
    }

    /// So many seconds are over, whether or not all have the shares that they should. Caps that fit may be over then.
    pub(super) fn age(&mut self, seconds: f64) {
        self.lasting.age(seconds);
        let Some(left_s) = &mut self.fitting_s else { return };
        *left_s -= seconds;
        if *left_s <= 0.0 {
            self.change(None);
            self.this_way = Toll::default();
        }
    }

    /// Learns from an interval in which nobody's share changed: what was seen of each model, its priority, and whether the
    /// whole GPU would carry it. `load` is the part of the GPU that all demand takes at least, `slowed` how many times as long batches take as they should
    /// beside such neighbours, where that is known.
    pub(super) fn observe<'s>(
        &mut self,
        models: impl Iterator<Item = (&'s Seen, u32, bool)>,
        load: f64,
        slowed: Option<f64>,
    ) {
        let divides_itself = self.fitting_s.is_none() && slowed.is_some_and(|slowed| slowed < SLOWED);
        if load >= ROOM || !std::mem::replace(&mut self.begun, true) || divides_itself {
            self.doubts = 0;
            return;
        }
        let fits = self.fitting_s.is_some();
        let mut telling = Tally::default();
        self.this_way.fade();
        for (seen, priority, carried) in models {
            let seen = Tally::of(seen);
            self.this_way.add(priority, seen);
            // Who is asked for more than the whole GPU could answer misses SLOs however it is shared.
            if carried || fits {
                telling += seen;
            }
        }
        self.intervals += 1;
        let doubtful = telling.arrived >= REQUESTS && telling.missed > MISSED * telling.arrived;
        self.doubts = if doubtful { self.doubts + 1 } else { 0 };
        if fits && self.is_over() {
            self.change(None);
        } else if !fits && self.is_to_be_tried() {
            let seconds = self.lasting.again();
            self.change(Some(seconds));
        }
    }

    /// Whether caps that fit have turned out to be the worse way.
    fn is_over(&self) -> bool {
        let misses_more = self.doubts >= INTERVALS && self.other_way.part() < self.this_way.part();
        misses_more || self.intervals >= TELLING && self.this_way.is_worse_than(&self.other_way)
    }

    /// Whether caps that fit may turn out to be the better way.
    fn is_to_be_tried(&self) -> bool {
        self.doubts >= INTERVALS
            && self.other_way.part() < BETTER * self.this_way.part()
            && !self.other_way.is_worse_than(&self.this_way)
    }

    /// Shares it the other way from now on.
    fn change(&mut self, fitting_s: Option<f64>) {
        std::mem::swap(&mut self.this_way, &mut self.other_way);
        (self.fitting_s, self.intervals, self.doubts) = (fitting_s, 0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPAN_S: f64 = 0.5;

    /// Intervals of a hundred requests of which so many miss.
    fn observe(regime: &mut Regime, missed: u64, load: f64, intervals: u32) -> Caps {
        let seen = Seen { arrived: 100, answered: 100, in_time: 100 - missed, ..Seen::default() };
        for _ in 0..intervals {
            regime.age(SPAN_S);
            regime.observe([(&seen, 1, true), (&Seen::default(), 1, true)].into_iter(), load, None);
        }
        regime.caps()
    }

    /// One whose first interval is over, in which all missed.
    fn begun() -> Regime {
        let mut regime = Regime::new();
        observe(&mut regime, 100, 0.5, 1);
        regime
    }

    #[test]
    fn misses_that_last_though_there_is_room_lead_to_the_other_way() {
        let mut regime = begun();
        assert_eq!(observe(&mut regime, 30, 0.5, 3), Caps::Generous);
        assert!(!regime.is_tried());
        assert_eq!(observe(&mut regime, 30, 0.5, 1), Caps::Fitting);
        let open =
            (0..100).take_while(|_| regime.is_tried() && observe(&mut regime, 0, 0.5, 1) == Caps::Fitting);
        assert_eq!(open.count(), 8);
        assert_eq!(observe(&mut regime, 0, 0.5, 100), Caps::Fitting);
    }

    #[test]
    fn overload_a_few_misses_and_a_bad_moment_do_not() {
        for (missed, load) in [(30, 0.95), (15, 0.5)] {
            assert_eq!(observe(&mut begun(), missed, load, 9), Caps::Generous);
        }
        let mut regime = begun();
        for _ in 0..9 {
            observe(&mut regime, 90, 0.5, 3);
            assert_eq!(observe(&mut regime, 1, 0.5, 1), Caps::Generous);
        }
        let seen = Seen { arrived: 10, refused: 10, ..Seen::default() };
        (0..9).for_each(|_| regime.observe([(&seen, 1, true)].into_iter(), 0.5, None));
        assert_eq!(regime.caps(), Caps::Generous, "too few to say anything");
    }

    #[test]
    fn batches_that_take_as_long_as_they_should_do_not() {
        let seen = Seen { arrived: 100, refused: 30, ..Seen::default() };
        let caps = |slowed: f64| {
            let mut regime = begun();
            (0..9).for_each(|_| regime.observe([(&seen, 1, true)].into_iter(), 0.5, Some(slowed)));
            regime.caps()
        };
        assert_eq!([0.7, 1.05, 1.2].map(caps), [Caps::Generous, Caps::Generous, Caps::Fitting]);
        let mut regime = begun();
        observe(&mut regime, 30, 0.5, 4);
        (0..3).for_each(|_| regime.observe([(&seen, 1, true)].into_iter(), 0.5, Some(1.0)));
        assert_eq!(regime.caps(), Caps::Fitting, "with caps that fit they do");
    }

    #[test]
    fn the_better_way_is_kept() {
        let mut regime = begun();
        observe(&mut regime, 30, 0.5, 4);
        assert_eq!(observe(&mut regime, 60, 0.5, 4), Caps::Generous);
        assert_eq!(observe(&mut regime, 30, 0.5, 100), Caps::Generous);
        let mut regime = begun();
        observe(&mut regime, 60, 0.5, 4);
        assert_eq!(observe(&mut regime, 30, 0.5, 100), Caps::Fitting);
        let mut regime = begun();
        observe(&mut regime, 30, 0.5, 4);
        assert_eq!(observe(&mut regime, 32, 0.5, 4), Caps::Generous, "a little better is enough");
    }

    /// Intervals of a hundred requests each of two priorities of which so many miss.
    fn observe_two(regime: &mut Regime, missed: [u64; 2], intervals: u32) -> Caps {
        let seen =
            |missed: u64| Seen { arrived: 100, answered: 100, in_time: 100 - missed, ..Seen::default() };
        let [first, second] = missed.map(seen);
        for _ in 0..intervals {
            regime.age(SPAN_S);
            regime.observe([(&first, 1, true), (&second, 2, true)].into_iter(), 0.5, None);
        }
        regime.caps()
    }

    #[test]
    fn what_lower_priorities_gain_at_a_higher_ones_cost_is_no_gain() {
        let mut regime = begun();
        assert_eq!(observe_two(&mut regime, [5, 60], 4), Caps::Fitting);
        assert_eq!(observe_two(&mut regime, [20, 0], 7), Caps::Fitting);
        assert_eq!(observe_two(&mut regime, [20, 0], 1), Caps::Generous);
        let again = (0..1_000).find(|_| observe_two(&mut regime, [5, 60], 1) == Caps::Fitting);
        assert_eq!(again, None, "nor is it tried again");
        let mut regime = begun();
        observe_two(&mut regime, [60, 5], 4);
        assert_eq!(observe_two(&mut regime, [10, 10], 100), Caps::Fitting, "but the other way round it is");
        let mut regime = begun();
        observe_two(&mut regime, [5, 60], 4);
        assert_eq!(
            observe_two(&mut regime, [5, 0], 100),
            Caps::Fitting,
            "and what costs a higher one nothing"
        );
        assert_eq!(observe_two(&mut regime, [6, 0], 100), Caps::Fitting, "or no more than chance does");
    }

    #[test]
    fn what_is_seen_of_few_requests_says_nothing_of_a_priority() {
        let of = |arrived: f64, missed: f64| Tally { arrived, missed };
        let more = |one: Tally, other: Tally| one.missed_more_than(&other);
        // 40 are expected, chance adds 19, and a hundredth 4.
        assert_eq!([62.0, 64.0].map(|missed| more(of(400.0, missed), of(100.0, 10.0))), [false, true]);
        assert!(!more(of(19.0, 19.0), of(100.0, 0.0)) && !more(of(100.0, 100.0), of(19.0, 0.0)));
        assert!(more(of(20.0, 20.0), of(20.0, 0.0)));
    }

    #[test]
    fn what_looked_like_it_and_was_not_is_forgotten() {
        let mut regime = begun();
        observe(&mut regime, 90, 0.5, 4);
        assert_eq!(observe(&mut regime, 0, 0.5, 239), Caps::Fitting);
        assert_eq!(observe(&mut regime, 0, 0.5, 1), Caps::Generous, "after two minutes");
        assert_eq!(observe(&mut regime, 0, 0.5, 1_000), Caps::Generous);
        let mut regime = begun();
        observe(&mut regime, 30, 0.5, 4);
        observe(&mut regime, 0, 0.5, 240);
        assert_eq!(observe(&mut regime, 30, 0.5, 3), Caps::Generous);
        assert_eq!(observe(&mut regime, 30, 0.5, 1), Caps::Fitting, "it was no outage");
        assert_eq!(observe(&mut regime, 0, 0.5, 479), Caps::Fitting);
    }

    #[test]
    fn what_came_of_a_way_long_ago_counts_no_more() {
        let mut regime = begun();
        observe(&mut regime, 90, 0.5, 4);
        assert_eq!(observe(&mut regime, 20, 0.5, 240), Caps::Generous, "their two minutes are over");
        assert_eq!(observe(&mut regime, 25, 0.5, 1_000), Caps::Generous, "20 are not much less");
        observe(&mut regime, 0, 0.5, 1_000);
        let tried = (1..1_000).find(|_| observe(&mut regime, 90, 0.5, 1) == Caps::Fitting);
        assert!(tried.is_some_and(|tried| (35..45).contains(&tried)), "when 20 are: {tried:?}");
    }

    #[test]
    fn they_end_where_no_share_comes_to_be_what_it_should() {
        let mut regime = begun();
        observe(&mut regime, 30, 0.5, 4);
        (0..239).for_each(|_| regime.age(SPAN_S));
        assert_eq!(regime.caps(), Caps::Fitting);
        regime.age(SPAN_S);
        assert_eq!(regime.caps(), Caps::Generous, "hand-overs fail again and again");
    }

    #[test]
    fn who_is_not_carried_is_no_reason_to_try_and_counts_once_it_is_tried() {
        let seen = |missed: u64| Seen { arrived: 100, refused: missed, ..Seen::default() };
        let interval = |regime: &mut Regime, missed: u64| {
            regime.observe([(&seen(missed), 1, false), (&seen(0), 1, true)].into_iter(), 0.5, None);
            regime.caps()
        };
        let mut regime = begun();
        assert!((0..100).all(|_| interval(&mut regime, 60) == Caps::Generous));
        let mut regime = begun();
        observe(&mut regime, 40, 0.5, 4);
        (0..4).for_each(|_| _ = interval(&mut regime, 90));
        assert_eq!(regime.caps(), Caps::Generous, "they miss more now");
    }

    #[test]
    fn a_day_later_it_begins_anew() {
        let mut regime = begun();
        observe(&mut regime, 30, 0.5, 4);
        regime.age(1_000.0);
        assert_eq!((regime.caps(), regime.lasting.again()), (Caps::Generous, 240.0));
        regime.age(86_400.0);
        assert_eq!(regime.lasting.again(), 120.0);
    }
}
