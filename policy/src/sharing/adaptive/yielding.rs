//! Whether lower priorities make room for a higher one.
//!
//! A generous cap takes nothing from who executes at the same time, as long as the GPU divides itself. Where kernels take turns
//! (docs/measurements/contention.md), one model's long kernels keep another's waiting on every SM that they may use. So where a
//! higher priority goes on missing its SLO, though it asks for little, lower ones leave some SMs to it; that stays if it helps.

use std::collections::BTreeMap;

use shadowslice_shared::units::Sms;

use super::lasting::Finding;
use super::loads::Loads;

/// A priority asks for little that takes less than this part of the GPU, with those above it.
const LITTLE: f64 = 0.5;

/// Nothing is said of fewer requests in an interval.
const REQUESTS: f64 = 20.0;

/// So many intervals in a row, in each of which twice as many or more missed their SLOs as may, and lower ones make room; after more of
/// them where it is less. As many tell whether that helps. Waits for company that are to blame have been cut by then.
const INTERVALS: u32 = 8;

/// They must miss less than this part of what they missed before.
const BETTER: f64 = 0.7;

/// Seconds within which lower ones must have made room and shown what that is worth; models take minutes to start at most.
const TRIAL_S: f64 = 300.0;

/// What part of the GPU those have who make room.
const LEFT: f64 = 0.65;

/// What was seen of a priority and those above it on one GPU, in an interval.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Class {
    pub(super) priority: u32,
    /// The part of the GPU that their demand takes at least.
    pub(super) load: f64,
    /// Requests that came.
    pub(super) arrived: f64,
    /// Those that were late or refused.
    pub(super) missed: f64,
    /// As many may be.
    pub(super) allowed: f64,
    /// Whether a lower one executes for much of the time.
    pub(super) beside: bool,
}

impl Class {
    /// What this interval says for lower ones' making room, from -1 to 1: how many more missed their SLOs than may, by those that may.
    fn suffers(&self) -> f64 {
        if self.arrived < REQUESTS || !self.beside || self.load >= LITTLE {
            return -1.0;
        }
        (self.missed / self.allowed.max(f64::MIN_POSITIVE) - 1.0).clamp(-1.0, 1.0)
    }
}

/// What a priority missed over some intervals.
#[derive(Debug, Clone, Copy, Default)]
struct Record {
    intervals: u32,
    /// What they say together, and never less than nothing.
    score: f64,
    arrived: f64,
    missed: f64,
}

impl Record {
    fn add(&mut self, class: &Class) {
        self.intervals += 1;
        self.score = (self.score + class.suffers()).max(0.0);
        self.arrived += class.arrived;
        self.missed += class.missed;
    }

    fn part(&self) -> f64 {
        self.missed / self.arrived.max(1.0)
    }
}

/// The priorities that have suffered for some intervals, but for those for whose sake it is known what making room is worth.
type Suffered = Vec<(u32, Record)>;

/// Who makes room on one GPU.
#[derive(Debug, Clone)]
enum State {
    /// Nobody.
    Nobody { suffered: Suffered },
    /// Those below this priority, which missed that part before, for so many seconds more at most.
    Tried { priority: u32, before: f64, since: Record, left_s: f64 },
    /// Those below it, unless it is asked for nothing in so many intervals, or one above it suffers.
    Helps { priority: u32, quiet: u32, suffered: Suffered },
}

/// Decides who makes room on one GPU.
#[derive(Debug, Clone)]
pub(super) struct Yielding {
    state: State,
    /// What trials found out, by the priority for whose sake they were.
    findings: BTreeMap<u32, Finding>,
    loads: Loads,
}

impl Yielding {
    pub(super) fn new() -> Self {
        Self { state: State::nobody(), findings: BTreeMap::new(), loads: Loads::default() }
    }

    /// The most that a model of this priority may have of a GPU with so many SMs.
    pub(super) fn most(&self, priority: u32, gpu: Sms) -> Sms {
        if !self.asks(priority) {
            return gpu;
        }
        let steps = f64::from(gpu.0) * LEFT / f64::from(Sms::STEP);
        Sms((steps.round() as u32).max(1) * Sms::STEP)
    }

    /// Whether a model of this priority makes room.
    pub(super) fn asks(&self, priority: u32) -> bool {
        match self.state {
            State::Tried { priority: above, .. } | State::Helps { priority: above, .. } => priority > above,
            State::Nobody { .. } => false,
        }
    }

    /// Whether a model of this priority keeps what it has: it suffers, or is made room for.
    pub(super) fn spares(&self, priority: u32) -> bool {
        match self.state {
            State::Nobody { ref suffered } => suffered.iter().any(|&(lowest, _)| priority <= lowest),
            State::Tried { priority: lowest, .. } | State::Helps { priority: lowest, .. } => {
                priority <= lowest
            }
        }
    }

    /// Learns from an interval of so many seconds, in which nobody's share changed if that is `settled`; highest priorities first.
    pub(super) fn observe(&mut self, classes: &[Class], span_s: f64, settled: bool) {
        self.loads.observe(classes.iter().map(|class| (class.priority, class.load)), span_s);
        self.findings.values_mut().for_each(|finding| finding.age(span_s));
        let class = |of: u32| classes.iter().find(|class| class.priority == of);
        self.state = match &self.state {
            State::Nobody { suffered } => {
                let suffered = self.suffering(suffered, classes.iter());
                State::tried(&suffered).unwrap_or(State::Nobody { suffered })
            }
            &State::Tried { priority, before, mut since, left_s } => {
                if let Some(class) = class(priority).filter(|_| settled) {
                    since.add(class);
                }
                let left_s = left_s - span_s;
                if since.intervals < INTERVALS && left_s > 0.0 {
                    State::Tried { priority, before, since, left_s }
                } else {
                    let finding = self.findings.entry(priority).or_default();
                    let told = since.intervals == INTERVALS;
                    if told {
                        finding.again(&self.loads);
                    } else {
                        finding.put_off();
                    }
                    if told && since.part() < BETTER * before {
                        State::Helps { priority, quiet: 0, suffered: Vec::new() }
                    } else {
                        State::nobody()
                    }
                }
            }
            State::Helps { priority, quiet, suffered } => {
                let (priority, above) = (*priority, |class: &&Class| class.priority < *priority);
                let asked = class(priority).is_some_and(|class| class.arrived > 0.0);
                let quiet = if asked { 0 } else { quiet + 1 };
                let suffered = self.suffering(suffered, classes.iter().filter(above));
                let tried = State::tried(&suffered);
                if quiet == INTERVALS || tried.is_some() {
                    self.findings.entry(priority).or_default().forget();
                }
                let known = self.is_known(priority);
                tried.unwrap_or(if known {
                    State::Helps { priority, quiet, suffered }
                } else {
                    State::nobody()
                })
            }
        };
    }

    /// Whether what a trial for the sake of this priority found out is still true.
    fn is_known(&self, priority: u32) -> bool {
        self.findings.get(&priority).is_some_and(|finding| finding.holds(&self.loads))
    }

    /// Who suffers after an interval, of these.
    fn suffering<'c>(&self, before: &Suffered, classes: impl Iterator<Item = &'c Class>) -> Suffered {
        let after = |class: &Class| {
            let before = before.iter().find(|(priority, _)| *priority == class.priority);
            let mut record = before.map(|(_, record)| *record).unwrap_or_default();
            record.add(class);
            (record.score > 0.0).then_some((class.priority, record))
        };
        classes.filter(|class| !self.is_known(class.priority)).filter_map(after).collect()
    }
}

impl State {
    fn nobody() -> Self {
        Self::Nobody { suffered: Vec::new() }
    }

    /// A trial for the sake of the highest priority that has suffered for long enough.
    fn tried(suffered: &Suffered) -> Option<Self> {
        let &(priority, record) = suffered.iter().find(|(_, record)| record.score >= f64::from(INTERVALS))?;
        let (before, since) = (record.part(), Record::default());
        Some(Self::Tried { priority, before, since, left_s: TRIAL_S })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPAN_S: f64 = 0.5;

    /// A hundred requests of the first priority, of which so many miss and five may, beside one that executes all the time.
    fn first(missed: f64) -> Class {
        Class { priority: 1, load: 0.1, arrived: 100.0, missed, allowed: 5.0, beside: true }
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
        assert_eq!([1, 2].map(|priority| yielding.most(priority, Sms(132))), [Sms(132), Sms(86)]);
        assert!(observe(&mut yielding, first(1.0), 8 + 5_000), "it helps");
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
            Class { beside: false, ..first(50.0) },
            Class { load: 0.5, ..first(50.0) },
            Class { arrived: 19.0, ..first(19.0) },
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
        let none = Class { allowed: 0.0, ..first(0.0) };
        assert!(!observe(&mut yielding, none, 100), "who may miss nothing and misses nothing");
        assert!(observe(&mut yielding, Class { missed: 1.0, ..none }, 8));
    }

    #[test]
    fn the_less_more_than_may_miss_the_longer_it_takes_to_tell() {
        let mut yielding = Yielding::new();
        assert!(!observe(&mut yielding, first(7.5), 15));
        assert!(observe(&mut yielding, first(7.5), 1));
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
        assert_eq!(see(10.0, 8), [true, true]);
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
        assert_eq!(see([10.0, 10.0], 7), [false, true]);
        assert_eq!(see([10.0, 10.0], 1), [true, true]);
        assert_eq!(see([10.0, 10.0], 8), [false, false], "in vain");
        assert_eq!(see([10.0, 10.0], 8), [false, true], "and the second is made room for again");
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
    fn who_cannot_make_room_is_asked_no_longer() {
        let mut yielding = Yielding::new();
        observe(&mut yielding, first(10.0), 8);
        let unsettled = |yielding: &mut Yielding, intervals: u32| {
            (0..intervals).for_each(|_| yielding.observe(&[first(0.0)], SPAN_S, false));
            yielding.asks(3)
        };
        assert!(unsettled(&mut yielding, 599));
        assert!(!unsettled(&mut yielding, 1), "hand-overs fail again and again");
        assert!(!observe(&mut yielding, first(10.0), 239 + 7), "for two minutes");
        assert!(observe(&mut yielding, first(10.0), 1), "nothing was found out");
    }

    #[test]
    fn room_that_nobody_asks_for_is_given_back() {
        let mut yielding = Yielding::new();
        observe(&mut yielding, first(10.0), 8);
        assert!(observe(&mut yielding, first(0.0), 8));
        let gone = Class { arrived: 0.0, ..first(0.0) };
        assert!(observe(&mut yielding, gone, 7));
        assert!(!observe(&mut yielding, gone, 1));
    }
}
