//! Trials for the sake of a priority that misses its SLOs: something is done about it, and stays if it helps.

use std::collections::BTreeMap;

use super::gathering::Gathering;
use super::lasting::Finding;
use super::loads::{Loads, Steady};
use super::tally::Tally;

/// Nothing is said of fewer requests.
const REQUESTS: f64 = 20.0;

/// So many intervals tell whether it helps.
const INTERVALS: u32 = 8;

/// Where loads have been the same for longer than so many intervals, it takes more to begin one. Who misses about as much as may be misses more now
/// and less then, and what that adds up to by chance grows as the root of their number (a random walk): in time it would be enough of anybody.
const SURE: f64 = 20.0;

/// No more of them make it more: who comes to suffer one day is helped within the minute.
const SURE_UP_TO: f64 = 2_000.0;

/// Seconds within which it must have been done and shown what it is worth; models take minutes to start at most.
const TRIAL_S: f64 = 300.0;

/// When something is tried, and when it is kept.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Rules {
    /// So many intervals in a row, in each of which twice as many or more missed their SLOs as may; or more of them where it is less.
    pub(super) after: f64,
    /// It is kept if less than this part of what was missed before is missed then, and lower priorities do not lose a larger part of their
    /// requests than that is.
    pub(super) better: f64,
}

/// What was seen of a priority on one GPU, in an interval, or in several of few requests.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Class {
    pub(super) priority: u32,
    /// How long that was.
    pub(super) seconds: f64,
    /// The part of the GPU that its demand takes at least.
    pub(super) load: f64,
    /// What came, and what of it missed the SLO.
    pub(super) seen: Tally,
    /// As many may miss it.
    pub(super) allowed: f64,
    /// Whether there is something to be done.
    pub(super) can_be_helped: bool,
    /// What was seen of those at whose cost it is done.
    pub(super) below: Tally,
}

impl Class {
    /// Whether there are enough requests to say something of it.
    pub(super) fn tells(&self) -> bool {
        self.seen.arrived >= REQUESTS
    }

    /// What this interval says for a trial, from -1 to 1: how many more missed their SLOs than may, by those that may.
    fn suffers(&self) -> f64 {
        if !self.can_be_helped {
            return -1.0;
        }
        (self.seen.missed / self.allowed.max(f64::MIN_POSITIVE) - 1.0).clamp(-1.0, 1.0)
    }

    /// Both, one after the other.
    pub(super) fn after(mut self, before: &Self) -> Self {
        self.seconds += before.seconds;
        self.seen += before.seen;
        self.allowed += before.allowed;
        self.can_be_helped &= before.can_be_helped;
        self.below += before.below;
        self
    }
}

/// What a priority missed over some intervals.
#[derive(Debug, Clone, Copy, Default)]
struct Record {
    intervals: u32,
    /// What they say together, and never less than nothing.
    score: f64,
    seconds: f64,
    seen: Tally,
    below: Tally,
}

impl Record {
    /// Who is asked too seldom to say something of it begins anew.
    fn add(&mut self, class: &Class) {
        if !class.tells() {
            *self = Self::default();
            return;
        }
        self.intervals += 1;
        self.score = (self.score + class.suffers()).max(0.0);
        self.seconds += class.seconds;
        self.seen += class.seen;
        self.below += class.below;
    }

    /// Whether less than this part of what was missed before is, and those below do not lose more than that.
    fn is_better_than(&self, before: &Self, better: f64) -> bool {
        let gained = before.seen.part() - self.seen.part();
        let lost = self.below.part() - before.below.part();
        self.seen.part() < better * before.seen.part() && lost <= gained
    }

    /// The seconds of an interval, on average.
    fn span(&self) -> f64 {
        (self.seconds / f64::from(self.intervals.max(1))).max(f64::MIN_POSITIVE)
    }

    /// Requests a second.
    fn rate(&self) -> f64 {
        self.seen.arrived / self.seconds.max(f64::MIN_POSITIVE)
    }
}

/// The priorities that have suffered for some intervals, but for those for whose sake it is known what a trial is worth.
type Suffered = BTreeMap<u32, Record>;

/// For whose sake something is done on one GPU.
#[derive(Debug, Clone)]
enum State {
    /// Nobody's.
    Nobody { suffered: Suffered },
    /// This priority's, of which that was seen before, for so many seconds more at most.
    Tried { priority: u32, before: Record, since: Record, left_s: f64 },
    /// This one's, which was asked for so many requests a second, unless it is asked for nothing in so many intervals, or one above it suffers.
    Helps { priority: u32, rate: f64, quiet: u32, suffered: Suffered },
}

/// The trials of one kind on one GPU, one at a time.
#[derive(Debug, Clone)]
pub(super) struct Trials {
    rules: Rules,
    state: State,
    /// Intervals of which nothing can be said yet.
    gathering: Gathering,
    /// What they found out, by the priority for whose sake they were.
    findings: BTreeMap<u32, Finding>,
    loads: Loads,
    steady: Steady,
}

impl Trials {
    pub(super) fn new(rules: Rules) -> Self {
        Self {
            rules,
            state: State::nobody(),
            gathering: Gathering::default(),
            findings: BTreeMap::new(),
            loads: Loads::default(),
            steady: Steady::default(),
        }
    }

    /// The priority for whose sake something is done.
    pub(super) fn sake(&self) -> Option<u32> {
        match self.state {
            State::Tried { priority, .. } | State::Helps { priority, .. } => Some(priority),
            State::Nobody { .. } => None,
        }
    }

    /// Whether it is still open whether what is done helps.
    pub(super) fn is_tried(&self) -> bool {
        matches!(self.state, State::Tried { .. })
    }

    /// The lowest priority that suffers, or for whose sake something is done.
    pub(super) fn lowest(&self) -> Option<u32> {
        match &self.state {
            State::Nobody { suffered } => suffered.keys().copied().max(),
            State::Tried { priority, .. } | State::Helps { priority, .. } => Some(*priority),
        }
    }

    /// Ends what is done, of which nothing can be said any more; it is not tried again for a while.
    pub(super) fn put_off(&mut self) {
        if let Some(priority) = self.sake() {
            self.findings.entry(priority).or_default().put_off();
            self.state = State::nobody();
        }
    }

    /// Learns from an interval of so many seconds, in which nobody's share changed if that is `settled`; highest priorities first.
    pub(super) fn observe(&mut self, classes: &[Class], span_s: f64, settled: bool) {
        self.loads.observe(classes.iter().map(|class| (class.priority, class.load)), span_s);
        self.steady.observe(&self.loads, span_s);
        self.findings.values_mut().for_each(|finding| finding.age(span_s));
        // What is seen while shares change does not say what a trial is worth.
        let telling = if settled || !self.is_tried() { self.gathering.add(classes) } else { Vec::new() };
        let class = |of: u32| move |class: &&Class| class.priority == of;
        self.state = match &self.state {
            State::Nobody { suffered } => {
                let suffered = self.suffering(suffered, classes, &telling);
                self.tried(&suffered).unwrap_or(State::Nobody { suffered })
            }
            &State::Tried { priority, before, mut since, left_s } => {
                telling.iter().filter(class(priority)).for_each(|class| since.add(class));
                let left_s = left_s - span_s;
                let stays = telling.iter().filter(class(priority)).all(Class::tells);
                if since.intervals < INTERVALS && left_s > 0.0 && stays {
                    State::Tried { priority, before, since, left_s }
                } else {
                    self.judged(priority, before, since)
                }
            }
            State::Helps { priority, rate, quiet, suffered } => {
                let (priority, rate) = (*priority, *rate);
                let asked =
                    classes.iter().find(class(priority)).is_some_and(|class| class.seen.arrived > 0.0);
                let quiet = if asked { 0 } else { quiet + 1 };
                let gone = quiet >= INTERVALS && f64::from(quiet) * span_s * rate >= REQUESTS;
                let above = classes.partition_point(|class| class.priority < priority);
                let suffered = self.suffering(suffered, &classes[..above], &telling);
                let tried = self.tried(&suffered);
                if gone || tried.is_some() {
                    self.findings.entry(priority).or_default().forget();
                }
                let known = self.is_known(priority);
                tried.unwrap_or(if known {
                    State::Helps { priority, rate, quiet, suffered }
                } else {
                    State::nobody()
                })
            }
        };
    }

    /// What becomes of a trial that is over.
    fn judged(&mut self, priority: u32, before: Record, since: Record) -> State {
        let finding = self.findings.entry(priority).or_default();
        if since.intervals < INTERVALS {
            finding.put_off();
            return State::nobody();
        }
        finding.again(&self.loads);
        if since.is_better_than(&before, self.rules.better) {
            State::Helps { priority, rate: since.rate(), quiet: 0, suffered: Suffered::new() }
        } else {
            State::nobody()
        }
    }

    /// Whether what a trial for the sake of this priority found out is still true.
    fn is_known(&self, priority: u32) -> bool {
        self.findings.get(&priority).is_some_and(|finding| finding.holds(&self.loads))
    }

    /// Who suffers after an interval, of these, of some of which something can be said.
    fn suffering(&self, before: &Suffered, classes: &[Class], telling: &[Class]) -> Suffered {
        let after = |&Class { priority, .. }: &Class| {
            let mut record = before.get(&priority).copied().unwrap_or_default();
            telling.iter().filter(|class| class.priority == priority).for_each(|class| record.add(class));
            (record.score > 0.0 && !self.is_known(priority)).then_some((priority, record))
        };
        classes.iter().filter_map(after).collect()
    }

    /// A trial for the sake of the highest priority that has suffered for long enough.
    fn tried(&self, suffered: &Suffered) -> Option<State> {
        let long_enough = |record: &Record| {
            let steady = (self.steady.seconds() / record.span()).clamp(SURE, SURE_UP_TO);
            self.rules.after * (steady / SURE).sqrt()
        };
        let (&priority, record) = suffered.iter().find(|(_, record)| record.score >= long_enough(record))?;
        let (before, since) = (*record, Record::default());
        Some(State::Tried { priority, before, since, left_s: TRIAL_S })
    }
}

impl State {
    fn nobody() -> Self {
        Self::Nobody { suffered: Suffered::new() }
    }
}
