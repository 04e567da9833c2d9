//! Whether lower priorities make room for a higher one.
//!
//! A generous cap takes nothing from who executes at the same time, as long as the GPU divides itself. Where kernels take turns
//! (docs/measurements/contention.md), one model's long kernels keep another's waiting on every SM that they may use. So where a
//! higher priority goes on missing its SLO, though it asks for little, lower ones leave some SMs to it; that stays if it helps.

use std::collections::BTreeMap;

use shadowslice_shared::units::Sms;

use super::layout::even;
use super::model::Model;
use super::trials::{Class, Rules, Trials};

/// It must suffer for so long, and miss less than this part of what it missed before.
const RULES: Rules = Rules { after: 8.0, better: 0.7 };

/// What part of the GPU those have who make room,
const LEFT: f64 = 0.5;

/// and what part at most, as far as that carries their demand,
const LEFT_TO_MANY: f64 = 0.65;

/// so many times, as requests do not come evenly.
const HEADROOM: f64 = 1.1;

/// Decides who makes room on one GPU.
#[derive(Debug, Clone)]
pub(super) struct Yielding {
    trials: Trials,
    /// For whose sake the GPU's models are,
    sake: Option<u32>,
    /// and what carried their demands when that began. Clients that wait for their answers ask for less of who has less.
    carry: BTreeMap<usize, Sms>,
}

impl Yielding {
    pub(super) fn new() -> Self {
        Self::knowing(Trials::new(RULES))
    }

    fn knowing(trials: Trials) -> Self {
        Self { trials, sake: None, carry: BTreeMap::new() }
    }

    /// What trials found out, without what models carried: whose places may be others.
    pub(super) fn findings(&self) -> Self {
        Self::knowing(self.trials.clone())
    }

    /// Looks what carries the demands of these models whenever room begins to be made.
    pub(super) fn make_room(&mut self, here: &[usize], models: &[Model]) {
        let sake = self.trials.sake();
        if std::mem::replace(&mut self.sake, sake) != sake {
            let carry = |&model: &usize| {
                let of = &models[model];
                Some((model, of.share_for(of.demand.peak() * HEADROOM)?))
            };
            self.carry = here.iter().filter_map(carry).collect();
        }
    }

    /// The most that a model of this priority may have of a GPU with so many SMs.
    pub(super) fn most(&self, model: usize, priority: u32, gpu: Sms) -> Sms {
        if !self.asks(priority) {
            return gpu;
        }
        let [left, most] = [LEFT, LEFT_TO_MANY].map(|part| Sms(even(f64::from(gpu.0) * part).max(Sms::STEP)));
        self.carry.get(&model).copied().unwrap_or(most).clamp(left, most)
    }

    /// Whether a model of this priority makes room.
    pub(super) fn asks(&self, priority: u32) -> bool {
        self.trials.sake().is_some_and(|above| priority > above)
    }

    /// Whether a model of this priority keeps what it has: it suffers, or is made room for.
    pub(super) fn spares(&self, priority: u32) -> bool {
        self.trials.lowest().is_some_and(|lowest| priority <= lowest)
    }

    /// Whether it is still open whether it helps.
    pub(super) fn is_tried(&self) -> bool {
        self.trials.is_tried()
    }

    /// Learns from an interval of so many seconds, in which nobody's share changed if that is `settled`; of each priority with those above it,
    /// the highest first.
    pub(super) fn observe(&mut self, classes: &[Class], span_s: f64, settled: bool) {
        self.trials.observe(classes, span_s, settled);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::super::Seen;
    use super::super::super::fixtures::{live, profile, terms};
    use super::super::super::{Live, Terms};
    use super::super::tally::Tally;
    use super::*;

    const SPAN_S: f64 = 0.5;
    const GPU: Sms = Sms(132);

    /// A hundred requests of the first priority, of which so many miss and five may, beside one that executes all the time.
    fn first(missed: f64) -> Class {
        let seen = Tally { arrived: 100.0, missed };
        let (seconds, load, allowed) = (SPAN_S, 0.1, 5.0);
        Class { priority: 1, seconds, load, seen, allowed, can_be_helped: true, ..Class::default() }
    }

    /// Whether the third priority makes room after so many such intervals.
    fn observe(yielding: &mut Yielding, class: Class, intervals: u32) -> bool {
        for _ in 0..intervals {
            yielding.observe(&[class], SPAN_S, true);
        }
        yielding.asks(3)
    }

    #[test]
    fn who_suffers_beside_lower_priorities_is_made_room_for() {
        let mut yielding = Yielding::new();
        assert!(!yielding.spares(1));
        assert!(!observe(&mut yielding, first(10.0), 7));
        assert_eq!([1, 2].map(|priority| yielding.spares(priority)), [true, false]);
        assert!(observe(&mut yielding, first(10.0), 1));
        assert_eq!([1, 2].map(|priority| yielding.most(0, priority, GPU)), [GPU, Sms(86)]);
        for (carry, most) in [(10, 66), (66, 66), (80, 80), (86, 86), (90, 86)] {
            yielding.carry.insert(0, Sms(carry));
            assert_eq!(yielding.most(0, 2, GPU), Sms(most));
        }
        assert!(observe(&mut yielding, first(1.0), 8 + 5_000), "it helps");
    }

    #[test]
    fn who_makes_room_keeps_what_carried_his_demand_when_that_began() {
        let terms = Terms { priority: 3, profile: Some(profile(2.0, 70.0, 132)), ..terms("a", 50) };
        let mut models = [Model::new(&terms, GPU)];
        let came = |arrived: u64, models: &mut [Model; 1]| {
            let span = Duration::from_millis(500);
            let seen =
                Seen { span, arrived, answered: arrived, in_time: arrived, busy: 0.9, ..Seen::default() };
            (0..200).for_each(|_| models[0].observe(&terms, &Live { seen: seen.clone(), ..live(GPU) }, None));
        };
        let mut yielding = Yielding::new();
        let mut most = |missed: f64, models: &[Model; 1]| {
            observe(&mut yielding, first(missed), 8);
            yielding.make_room(&[0], models);
            yielding.most(0, 3, GPU).0
        };
        came(360, &mut models);
        assert_eq!(most(10.0, &models), 78);
        came(100, &mut models);
        assert_eq!(most(1.0, &models), 78, "clients that wait ask for less of who has less");
    }

    #[test]
    fn room_that_helped_is_given_back_once_the_load_is_another() {
        let mut yielding = Yielding::new();
        observe(&mut yielding, first(10.0), 8);
        let more = Class { load: 0.3, ..first(1.0) };
        assert!(observe(&mut yielding, first(1.0), 8));
        assert!(observe(&mut yielding, more, 239), "within two minutes nothing is tried again");
        assert!(!observe(&mut yielding, more, 1));
        let mut yielding = Yielding::new();
        observe(&mut yielding, first(10.0), 8);
        assert!(observe(&mut yielding, first(1.0), 8 + 239 + 7_200));
        assert!(!observe(&mut yielding, first(1.0), 1), "an hour later it is looked at again");
    }

    #[test]
    fn nobody_is_that_does_not_suffer_for_want_of_it() {
        let fine = [
            first(5.0),
            Class { can_be_helped: false, ..first(50.0) },
            Class { seen: Tally { arrived: 0.15, missed: 0.15 }, allowed: 0.0, ..first(0.0) },
        ];
        for class in fine {
            assert!(!observe(&mut Yielding::new(), class, 100), "{class:?}");
        }
        let mut yielding = Yielding::new();
        for _ in 0..9 {
            observe(&mut yielding, first(50.0), 4);
            assert!(!observe(&mut yielding, first(0.0), 4), "a bad moment");
        }
        assert!(!yielding.spares(1));
        let mut yielding = Yielding::new();
        let none = Class { allowed: 0.0, ..first(0.0) };
        assert!(!observe(&mut yielding, none, 9), "who may miss nothing and misses nothing");
        assert!(observe(&mut yielding, Class { allowed: 0.0, ..first(1.0) }, 8));
    }

    #[test]
    fn the_less_more_than_may_miss_the_longer_it_takes_to_tell() {
        let mut yielding = Yielding::new();
        assert!(!observe(&mut yielding, first(7.5), 15));
        assert!(observe(&mut yielding, first(7.5), 1));
    }

    #[test]
    fn who_has_gone_well_for_long_must_suffer_for_longer() {
        // The intervals until room is made, after so many in which as many missed as may, then under such a load.
        let after = |well: u32, load: f64| {
            let mut yielding = Yielding::new();
            assert!(!observe(&mut yielding, first(5.0), well));
            (1..1_000).find(|_| observe(&mut yielding, Class { load, ..first(10.0) }, 1))
        };
        assert_eq!([1, 8].map(|well| after(well, 0.1)), [Some(8); 2]);
        // 120 intervals and 22 more are 71 s: eight times the root of 7.1 are 21.3.
        assert_eq!([120, 100_000].map(|well| after(well, 0.1)), [Some(22), Some(80)]);
        let another = after(120, 0.5);
        assert!(another > Some(8) && another < Some(22), "as soon as that is known: {another:?}");
    }

    #[test]
    fn one_priority_does_not_hide_another() {
        let mut yielding = Yielding::new();
        let second = Class { priority: 2, ..first(10.0) };
        for missed in [10.0, 0.0].repeat(4) {
            yielding.observe(&[first(missed), second], SPAN_S, true);
        }
        assert_eq!([1, 2, 3].map(|priority| yielding.asks(priority)), [false, false, true]);
    }

    #[test]
    fn what_was_in_vain_for_one_priority_may_help_another() {
        let mut yielding = Yielding::new();
        let second = Class { priority: 2, ..first(10.0) };
        let mut see = |missed: f64, intervals: u32| {
            (0..intervals).for_each(|_| yielding.observe(&[first(missed), second], SPAN_S, true));
            [2, 3].map(|priority| yielding.asks(priority))
        };
        assert_eq!(see(0.0, 8), [false, true]);
        assert_eq!(see(0.0, 8), [false, false], "it did not help the second");
        assert_eq!(see(10.0, 9), [true, true]);
    }

    #[test]
    fn who_suffers_above_one_that_is_made_room_for_is_not_hidden() {
        let mut yielding = Yielding::new();
        let second = |missed: f64| Class { priority: 2, ..first(missed) };
        let mut see = |missed: [f64; 2], intervals: u32| {
            let classes = [first(missed[0]), second(missed[1])];
            (0..intervals).for_each(|_| yielding.observe(&classes, SPAN_S, true));
            [2, 3].map(|priority| yielding.asks(priority))
        };
        assert_eq!(see([0.0, 10.0], 8), [false, true]);
        assert_eq!(see([0.0, 1.0], 8), [false, true], "it helps the second");
        assert_eq!(see([10.0, 10.0], 8), [false, true]);
        assert_eq!(see([10.0, 10.0], 1), [true, true]);
        assert_eq!(see([10.0, 10.0], 8), [false, false], "in vain");
        assert_eq!(see([10.0, 10.0], 12), [false, true], "and the second is made room for again");
    }

    #[test]
    fn what_does_not_help_is_not_kept_and_tried_again_later() {
        let mut yielding = Yielding::new();
        observe(&mut yielding, first(10.0), 8);
        for _ in 0..100 {
            yielding.observe(&[first(90.0)], SPAN_S, false);
        }
        assert!(observe(&mut yielding, first(8.0), 7), "nothing counts before all have their shares");
        assert!(!observe(&mut yielding, first(8.0), 1));
        assert!(!observe(&mut yielding, first(10.0), 5_000), "where nothing changes");
        let more = Class { load: 0.3, ..first(10.0) };
        assert!((0..100).any(|_| observe(&mut yielding, more, 1)), "but where more is asked for");
    }

    #[test]
    fn what_helps_is_not_kept_where_those_below_lose_more_than_it_brings() {
        // Of two hundred requests of those below so many miss then, and ten did before; a tenth of the first priority's did, and three in a hundred then.
        let is_kept = |missed: f64| {
            let mut yielding = Yielding::new();
            let beside =
                |own: f64, missed: f64| Class { below: Tally { arrived: 200.0, missed }, ..first(own) };
            observe(&mut yielding, beside(10.0, 10.0), 8);
            observe(&mut yielding, beside(3.0, missed), 8)
        };
        assert_eq!([0.0, 23.0, 25.0, 200.0].map(is_kept), [true, true, false, false]);
    }

    #[test]
    fn who_cannot_make_room_is_asked_no_longer() {
        let mut yielding = Yielding::new();
        observe(&mut yielding, first(10.0), 8);
        let unsettled = |yielding: &mut Yielding, intervals: u32| {
            (0..intervals).for_each(|_| yielding.observe(&[first(0.0)], SPAN_S, false));
            yielding.asks(3)
        };
        assert!(unsettled(&mut yielding, 599));
        assert!(!unsettled(&mut yielding, 1), "hand-overs fail again and again");
        assert!(!observe(&mut yielding, first(10.0), 239), "for two minutes");
        let again = (1..).find(|_| observe(&mut yielding, first(10.0), 1));
        assert_eq!(again, Some(54), "nothing was found out, and the load has stayed for 450 s");
    }

    #[test]
    fn room_that_nobody_asks_for_is_given_back() {
        let mut yielding = Yielding::new();
        observe(&mut yielding, first(10.0), 8);
        assert!(observe(&mut yielding, first(0.0), 8));
        let gone = Class { seen: Tally::default(), ..first(0.0) };
        assert!(observe(&mut yielding, gone, 7));
        assert!(!observe(&mut yielding, gone, 1));
    }

    /// So many requests in an interval, of which that part missed the SLO and one in twenty may.
    fn few(requests: f64, missed: f64) -> Class {
        Class {
            seen: Tally { arrived: requests, missed: requests * missed },
            allowed: requests / 20.0,
            ..first(0.0)
        }
    }

    #[test]
    fn who_is_seldom_asked_is_made_room_for_too() {
        let mut yielding = Yielding::new();
        assert!(!observe(&mut yielding, few(2.0, 0.5), 79));
        assert!(
            observe(&mut yielding, few(2.0, 0.5), 1),
            "a hundred and sixty requests, as of who is often asked"
        );
        assert!(observe(&mut yielding, few(2.0, 0.01), 80 + 5_000), "it helps");
        let mut yielding = Yielding::new();
        observe(&mut yielding, few(2.0, 0.5), 80);
        assert!(observe(&mut yielding, few(2.0, 0.5), 79));
        assert!(!observe(&mut yielding, few(2.0, 0.5), 1), "it does not");
    }

    #[test]
    fn a_while_without_requests_is_no_end_of_who_is_seldom_asked() {
        let mut yielding = Yielding::new();
        observe(&mut yielding, few(2.0, 0.5), 80);
        assert!(observe(&mut yielding, few(2.0, 0.0), 80));
        assert!(observe(&mut yielding, few(0.0, 0.0), 9), "twenty should have come in ten intervals");
        assert!(!observe(&mut yielding, few(0.0, 0.0), 1));
    }

    #[test]
    fn a_trial_for_who_is_asked_no_more_is_over_within_a_minute() {
        let mut yielding = Yielding::new();
        observe(&mut yielding, few(2.0, 0.5), 80);
        assert!(observe(&mut yielding, few(2.0, 0.5), 70));
        assert!(observe(&mut yielding, few(0.0, 0.0), 119));
        assert!(!observe(&mut yielding, few(0.0, 0.0), 1));
    }

    #[test]
    fn what_was_suffered_before_a_minute_without_requests_is_over() {
        let mut yielding = Yielding::new();
        assert!(!observe(&mut yielding, few(2.0, 0.5), 70));
        assert!(yielding.spares(1));
        observe(&mut yielding, few(0.0, 0.0), 120);
        assert!(!yielding.spares(1));
        assert!(!observe(&mut yielding, few(2.0, 0.5), 99));
        assert!(
            observe(&mut yielding, few(2.0, 0.5), 1),
            "ten times twenty requests: loads have been the same for long"
        );
    }
}
