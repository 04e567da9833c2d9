//! How much of its level a model has: as much as carries its demand with head-room.
//!
//! More would be of no use to it, and take from who needs it in the same moment; less would be too little before a
//! hand-over can bring more. The demand is the largest of late, so that a share does not follow every wave. Who meets bursts
//! keeps what he has: a share that carries their mean is too small in each of them, for a moment.

use shadowslice_shared::units::Sms;

use super::super::{Live, Terms};
use super::model::Model;
use crate::pressure::Watch;

/// How many times its demand a share carries.
const HEADROOM: f64 = 2.5;

/// The share stays while it carries what comes for certain with that head-room divided by this,
const BAND: f64 = 1.5;

/// and while it does not carry the demand with that head-room times this: more than enough is in nobody's way by much.
const SURPLUS: f64 = 2.0;

/// No share is less than this part of all that the model may have, however small the demand, nor less than somebody chose to start the
/// model with: who is seldom asked is to answer fast. A level that is low for the sake of others is no reason for less.
const LEAST: f64 = 0.4;

/// A model to which less comes, in requests a second of late, is idle: its share takes nothing from anybody, and stays.
const IDLE: f64 = 0.01;

/// Shares do not shrink before the demand has been observed for so long, in seconds.
const OBSERVED_S: f64 = 5.0;

/// What a model should have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sizing {
    /// Where it should be.
    pub(super) target: Sms,
    /// It may stay from here
    low: Sms,
    /// to here.
    high: Sms,
    /// The most that it should ever have.
    level: Sms,
    /// Whether nothing has come to it for long.
    idle: bool,
}

impl Sizing {
    pub(super) fn of(model: &Model, terms: &Terms, level: Sms) -> Self {
        let part = Sms(((f64::from(model.most(terms).0) * LEAST) as u32).next_multiple_of(Sms::STEP));
        let chosen = if terms.initial_given { terms.initial } else { terms.min };
        let least = if model.was_pressed() { level } else { terms.within(part.max(chosen)).min(level) };
        let carries = |rate: f64| {
            let share = model.share_for(rate);
            share.map_or(level, |share| share.max(least).min(level))
        };
        let low = carries(model.demand.at_least() * HEADROOM / BAND);
        let idle = model.demand.peak() < IDLE;
        if idle {
            return Self { target: level, low: terms.min, high: level, level, idle };
        }
        if model.demand.observed() < OBSERVED_S || model.demand.is_bursty() {
            return Self { target: level, low, high: level, level, idle };
        }
        let target = carries(model.demand.peak() * HEADROOM);
        // What comes since a moment ago may be bursts.
        let steady = model.demand.is_steady();
        let high = if steady { carries(model.demand.peak() * HEADROOM * SURPLUS) } else { level };
        Self { target, low, high, level, idle }
    }

    /// The same for one whose demand is no reason to shrink: its level takes something from it, nothing else.
    pub(super) fn kept(self) -> Self {
        Self { target: self.level, high: self.level, ..self }
    }

    /// The same for one that has come to rest: more than enough is no reason to shrink.
    pub(super) fn at_rest(self) -> Self {
        Self { high: self.level, ..self }
    }

    /// The share that a model should have that has this one, or will: another one only if it is worth it. Who has more than his level
    /// comes down to that first: whoever then takes less keeps one ready beside it with all that he may need.
    pub(super) fn of_one_with(&self, share: Sms) -> Sms {
        if share > self.level {
            self.level
        } else if share < self.low || share > self.high {
            self.target
        } else {
            share
        }
    }

    /// When more comes than a share is for: all that it carries is so much more than its demand of late that it need not be
    /// reached for that. What is between is left to the intervals.
    pub(super) fn watch(model: &Model, share: Sms) -> Watch {
        let expected = model.demand.expected();
        match model.carried_by(share) {
            Some(carried) => Watch::new(expected, carried, model.demand.dispersion()),
            None => Watch::of_slack(expected),
        }
    }

    /// The share at which a second worker should stand ready beside this one: all that it may need at once.
    pub(super) fn standby(&self, live: &Live) -> Option<Sms> {
        let share = live.coming.unwrap_or(live.share);
        // Who is held would not be moved there, and who is idle does not need it soon.
        let wanted = !live.held && !self.idle && share < self.level && !near(share, self.level);
        wanted.then_some(self.level)
    }
}

/// The share that carries all that came to a model of late, with head-room; nothing while it is not known what it carries.
pub(super) fn ample(model: &Model) -> Option<Sms> {
    model.share_for(model.demand.peak() * HEADROOM)
}

/// Shares nearer to each other than this, as a factor, are not worth a hand-over.
const DEAD_BAND: f64 = 1.1;

/// Whether two shares are as good as one.
pub(super) fn near(one: Sms, other: Sms) -> bool {
    let (small, large) = (one.min(other), one.max(other));
    large.0 - small.0 < Sms::STEP || f64::from(large.0) <= f64::from(small.0) * DEAD_BAND
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use shadowslice_shared::units::Moment;

    use super::super::super::Seen;
    use super::super::super::fixtures::{live, profile, terms};
    use super::*;
    use crate::pressure::Pressure;

    const LEVEL: Sms = Sms(100);

    /// So many requests came in half a second.
    fn arrivals(arrived: u64) -> Live {
        let mut live = live(LEVEL);
        live.seen = Seen { span: Duration::from_millis(500), arrived, ..Seen::default() };
        live
    }

    /// 2 ms and 70 ms·SM a row, up to 66 SMs; 50 ms. So many requests came in each half of a second.
    fn sizing(arrived: &[u64], known: bool) -> Sizing {
        let terms = Terms { profile: known.then(|| profile(2.0, 70.0, 66)), ..terms("a", 50) };
        let mut model = Model::new(&terms, Sms(132));
        for &arrived in arrived {
            model.observe(&terms, &arrivals(arrived), None);
        }
        Sizing::of(&model, &terms, LEVEL)
    }

    #[test]
    fn a_share_follows_the_demand_with_head_room() {
        // 16 rows in 30 ms on 40 SMs, nine tenths of the time: 480 a second. In 24 ms on 50: 590.
        let target = |arrived: u64| sizing(&[arrived; 12], true).target.0;
        assert!((48..=60).contains(&target(120)), "{}", target(120));
        assert!(target(150) > target(120));
        assert_eq!(target(1), 52, "two fifths of the GPU are kept, though the level is less");
        assert!(target(10_000) <= 100);
    }

    #[test]
    fn who_may_have_little_keeps_two_fifths_of_that() {
        let terms = Terms { max: Sms(60), profile: Some(profile(2.0, 70.0, 66)), ..terms("a", 50) };
        let mut model = Model::new(&terms, Sms(132));
        (0..12).for_each(|_| model.observe(&terms, &arrivals(1), None));
        assert_eq!(Sizing::of(&model, &terms, Sms(60)).target, Sms(24));
    }

    #[test]
    fn a_request_of_many_rows_is_as_many() {
        let terms = Terms { profile: Some(profile(2.0, 70.0, 66)), ..terms("a", 50) };
        let of = |arrived: u64, rows: u64| {
            let mut model = Model::new(&terms, Sms(132));
            for _ in 0..12 {
                let mut live = arrivals(arrived);
                live.seen.rows = rows;
                model.observe(&terms, &live, None);
            }
            let share = Sizing::of(&model, &terms, LEVEL).target;
            (share, model.load(), model.could_be_carried(), model.carried_by(Sms(40)))
        };
        let (share, load, carried, at_most) = of(15, 120);
        let (of_single, load_of_single, _, rows_at_most) = of(120, 120);
        assert_eq!((share, load, carried), (of_single, load_of_single, true));
        assert_eq!(at_most, rows_at_most.map(|rows| rows / 8.0), "the watch counts requests");
        assert!(!of(1_000, 16_000).2);
    }

    #[test]
    fn it_moves_only_when_it_is_off_by_much() {
        let sizing = sizing(&[120; 12], true);
        assert_eq!(sizing.of_one_with(sizing.target), sizing.target);
        assert_eq!(sizing.of_one_with(Sms(sizing.target.0 + 4)).0, sizing.target.0 + 4);
        assert_eq!(sizing.of_one_with(LEVEL), sizing.target);
        assert_eq!(sizing.of_one_with(Sms(132)), LEVEL, "one step at a time");
        assert_eq!(sizing.of_one_with(Sms(4)), sizing.target);
        let little = self::sizing(&[60; 12], true);
        assert_eq!([56, 64].map(|share| little.of_one_with(Sms(share))), [Sms(56), little.target]);
    }

    #[test]
    fn who_keeps_his_share_gives_up_only_what_his_level_takes() {
        let kept = sizing(&[120; 12], true).kept();
        assert_eq!([LEVEL, Sms(80), Sms(132)].map(|share| kept.of_one_with(share)), [LEVEL, Sms(80), LEVEL]);
    }

    #[test]
    fn who_is_at_rest_has_what_he_has_if_it_is_enough() {
        let sizing = sizing(&[120; 12], true);
        let of = |share: u32| sizing.at_rest().of_one_with(Sms(share));
        assert_eq!([of(100), of(80)], [LEVEL, Sms(80)]);
        assert_eq!([of(4), of(132)], [sizing.target, LEVEL], "too little, and more than his level");
    }

    #[test]
    fn nothing_shrinks_before_the_demand_is_known() {
        assert_eq!(sizing(&[1; 9], true).of_one_with(LEVEL), LEVEL);
        assert_ne!(sizing(&[1; 10], true).of_one_with(LEVEL), LEVEL);
        assert_eq!(sizing(&[1; 20], false).of_one_with(LEVEL), LEVEL, "nor while nobody knows what it costs");
    }

    #[test]
    fn nothing_shrinks_while_the_demand_changes() {
        let changed = |since: usize| sizing(&[&[20; 20][..], &vec![120; since]].concat(), true);
        assert_eq!(changed(5).of_one_with(LEVEL), LEVEL);
        assert_ne!(changed(6).of_one_with(LEVEL), LEVEL);
        assert!(changed(1).of_one_with(Sms(16)) > Sms(16), "growth does not wait");
    }

    #[test]
    fn a_moment_in_which_more_comes_is_no_reason_to_grow() {
        // 22 of 9 that are expected are news, but of a rate that may be anything from 25 to 63.
        let terms = Terms { profile: Some(profile(20.0, 900.0, 66)), ..terms("a", 400) };
        let seldom = |then: Option<u64>| {
            let mut model = Model::new(&terms, Sms(132));
            for arrived in [9; 40].into_iter().chain(then) {
                model.observe(&terms, &arrivals(arrived), None);
            }
            Sizing::of(&model, &terms, LEVEL)
        };
        let (known, once) = (seldom(None), seldom(Some(22)));
        assert!(once.target > known.target);
        assert_eq!(once.of_one_with(known.target), known.target);
    }

    #[test]
    fn nothing_shrinks_under_bursts_nor_grows_for_them() {
        let bursty = sizing(&[20, 2, 30, 5, 18, 3].repeat(4), true);
        assert_eq!(bursty.of_one_with(LEVEL), LEVEL);
        assert_eq!(bursty.of_one_with(Sms(52)), Sms(52));
    }

    #[test]
    fn who_is_idle_stays_where_he_is_and_needs_nobody_beside_him() {
        let silence = [0; 400];
        let seldom: Vec<u64> = [1; 12].into_iter().chain(silence).collect();
        for sizing in [sizing(&silence, true), sizing(&seldom, true)] {
            for share in [LEVEL, Sms(72), Sms(4)] {
                assert_eq!(sizing.of_one_with(share), share);
                assert_eq!(sizing.standby(&live(share)), None);
            }
            assert_eq!(sizing.of_one_with(Sms(120)), LEVEL, "a level is a level");
        }
    }

    #[test]
    fn a_rise_is_held_against_what_comes_now_and_not_its_peak() {
        let terms = Terms { profile: Some(profile(2.0, 70.0, 66)), ..terms("a", 50) };
        let mut model = Model::new(&terms, Sms(132));
        for arrived in [120; 12].into_iter().chain([60; 6]) {
            model.observe(&terms, &arrivals(arrived), None);
        }
        let alarmed_after = |watch: Watch| {
            let mut pressure = Pressure::default();
            let at = |n: u64| Moment::after_origin(Duration::from_millis(n));
            (1..1_000).find(|&n| pressure.note(None, at(n), watch, at(n)).is_some())
        };
        let share = Sms(50);
        let (carried, dispersion) = (model.carried_by(share).unwrap(), model.demand.safe_dispersion());
        let by_peak = alarmed_after(Watch::new(model.demand.peak(), carried, dispersion));
        let after = alarmed_after(Sizing::watch(&model, share));
        assert!(after.is_some() && after < by_peak, "{after:?} of {by_peak:?}");
    }

    #[test]
    fn where_nobody_can_say_what_is_too_much_slack_is_still_watched_by_the_rate() {
        let alarmed_after = |arrived: u64| {
            let mut model = Model::new(&terms("a", 50), Sms(132));
            (0..12).for_each(|_| model.observe(&terms("a", 50), &arrivals(arrived), None));
            let (watch, mut pressure) = (Sizing::watch(&model, LEVEL), Pressure::default());
            let at = |us: u64| Moment::after_origin(Duration::from_micros(us));
            (1..1_000).find(|&n| pressure.note(Some(at(n + 1)), at(n), watch, at(n)).is_some())
        };
        assert_eq!(alarmed_after(5), Some(32));
        assert!(alarmed_after(1_000).is_some_and(|after| (200..220).contains(&after)));
    }

    #[test]
    fn nobody_has_less_than_somebody_chose_for_him() {
        let terms = Terms { initial: Sms(80), initial_given: true, ..terms("a", 50) };
        let mut model =
            Model::new(&Terms { profile: Some(profile(2.0, 70.0, 66)), ..terms.clone() }, Sms(132));
        for _ in 0..12 {
            model.observe(&terms, &arrivals(1), None);
        }
        assert_eq!(Sizing::of(&model, &terms, LEVEL).target, Sms(80));
        assert_eq!(Sizing::of(&model, &terms, Sms(60)).target, Sms(60), "nor more than his level");
    }

    #[test]
    fn all_of_the_level_stands_ready_beside_less() {
        let sizing = sizing(&[60; 12], true);
        assert_eq!(sizing.standby(&live(sizing.target)), Some(LEVEL));
        assert_eq!(sizing.standby(&live(LEVEL)), None);
        assert_eq!(sizing.standby(&Live { held: true, ..live(sizing.target) }), None);
        let coming = Live { coming: Some(LEVEL), ..live(sizing.target) };
        assert_eq!(sizing.standby(&coming), None);
    }
}
