//! Trials for the sake of a priority that misses its SLOs: something is done about it, in steps, each of which stays if it helps.

use std::collections::BTreeMap;

use super::lasting::Finding;
use super::loads::Loads;

/// Nothing is said of fewer requests in an interval.
const REQUESTS: f64 = 20.0;

/// So many intervals tell whether it helps. Waits for company that are to blame for misses have been cut by then.
const INTERVALS: u32 = 8;

/// Seconds within which it must have been done and shown what it is worth; models take minutes to start at most.
const TRIAL_S: f64 = 300.0;

/// When something is tried, and when it is kept.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Rules {
    /// So many intervals in a row, in each of which twice as many or more missed their SLOs as may; or more of them where it is less.
    pub(super) after: f64,
    /// A first step at any cost is kept if less than this part of what was missed before is missed then.
    pub(super) better: f64,
    /// So many steps.
    pub(super) steps: u32,
}

/// Any other step is kept if less than this part is, and all on the GPU miss no more.
const BETTER_FOR_ALL: f64 = 0.9;

impl Rules {
    /// Whether the last of so many steps is worth it, by what was missed before and since.
    fn is_worth(&self, steps: u32, before: &Record, since: &Record) -> bool {
        if steps == 1 && before.at_any_cost {
            return since.part() < self.better * before.part();
        }
        since.part() < BETTER_FOR_ALL * before.part() && since.part_of_all() <= before.part_of_all()
    }
}

/// What was seen of a priority on one GPU, in an interval.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Class {
    pub(super) priority: u32,
    /// The part of the GPU that its demand takes at least.
    pub(super) load: f64,
    /// Requests that came.
    pub(super) arrived: f64,
    /// Those that were late or refused.
    pub(super) missed: f64,
    /// As many may be.
    pub(super) allowed: f64,
    /// Whether there is something to be done,
    pub(super) can_be_helped: bool,
    /// and whether the first step is worth whatever it costs others.
    pub(super) at_any_cost: bool,
    /// All requests that came to the GPU,
    pub(super) all_arrived: f64,
    /// and those of them that were late or refused.
    pub(super) all_missed: f64,
}

impl Class {
    /// What this interval says for a trial, from -1 to 1: how many more missed their SLOs than may, by those that may.
    fn suffers(&self) -> f64 {
        if self.arrived < REQUESTS || !self.can_be_helped {
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
    at_any_cost: bool,
    all_arrived: f64,
    all_missed: f64,
}

impl Record {
    fn add(&mut self, class: &Class) {
        self.intervals += 1;
        self.score = (self.score + class.suffers()).max(0.0);
        self.arrived += class.arrived;
        self.missed += class.missed;
        self.at_any_cost = class.at_any_cost;
        self.all_arrived += class.all_arrived;
        self.all_missed += class.all_missed;
    }

    fn part(&self) -> f64 {
        self.missed / self.arrived.max(1.0)
    }

    fn part_of_all(&self) -> f64 {
        self.all_missed / self.all_arrived.max(1.0)
    }
}

/// What is done: so many steps for the sake of this priority.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Done {
    priority: u32,
    steps: u32,
}

/// The priorities that have suffered for some intervals, but for those for whose sake it is known what a trial is worth.
type Suffered = Vec<(u32, Record)>;

/// For whose sake something is done on one GPU.
#[derive(Debug, Clone)]
enum State {
    /// Nobody's.
    Nobody { suffered: Suffered },
    /// The last step is on trial, for so many seconds more at most.
    Tried { done: Done, before: Record, since: Record, left_s: f64 },
    /// It helps, unless the priority has been asked for nothing in so many intervals. It or one above it may still suffer.
    Helps { done: Done, quiet: u32, suffered: Suffered },
}

/// The trials of one kind on one GPU, one at a time.
#[derive(Debug, Clone)]
pub(super) struct Trials {
    rules: Rules,
    state: State,
    /// What they found out.
    findings: BTreeMap<Done, Finding>,
    loads: Loads,
}

impl Trials {
    pub(super) fn new(rules: Rules) -> Self {
        Self { rules, state: State::nobody(), findings: BTreeMap::new(), loads: Loads::default() }
    }

    fn done(&self) -> Option<Done> {
        match self.state {
            State::Tried { done, .. } | State::Helps { done, .. } => Some(done),
            State::Nobody { .. } => None,
        }
    }

    /// The priority for whose sake something is done.
    pub(super) fn sake(&self) -> Option<u32> {
        self.done().map(|done| done.priority)
    }

    /// How many steps are done.
    pub(super) fn steps(&self) -> u32 {
        self.done().map_or(0, |done| done.steps)
    }

    /// The lowest priority that suffers, or for whose sake something is done.
    pub(super) fn lowest(&self) -> Option<u32> {
        match &self.state {
            State::Nobody { suffered } => suffered.iter().map(|&(priority, _)| priority).max(),
            State::Tried { done, .. } | State::Helps { done, .. } => Some(done.priority),
        }
    }

    /// Ends what is done, of which nothing can be said any more; it is not tried again for a while.
    pub(super) fn put_off(&mut self) {
        if let Some(done) = self.done() {
            self.findings.entry(done).or_default().put_off();
            self.state = State::nobody();
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
                self.tried(&suffered).unwrap_or(State::Nobody { suffered })
            }
            &State::Tried { done, before, mut since, left_s } => {
                if let Some(class) = class(done.priority).filter(|_| settled) {
                    since.add(class);
                }
                let left_s = left_s - span_s;
                if since.intervals < INTERVALS && left_s > 0.0 {
                    State::Tried { done, before, since, left_s }
                } else {
                    self.judged(done, &before, &since)
                }
            }
            State::Helps { done, quiet, suffered } => {
                let (done, not_below) = (*done, |class: &&Class| class.priority <= done.priority);
                let asked = class(done.priority).is_some_and(|class| class.arrived > 0.0);
                let quiet = if asked { 0 } else { quiet + 1 };
                let suffered = self.suffering(suffered, classes.iter().filter(not_below));
                let tried = self.tried(&suffered);
                let gives_way =
                    matches!(tried, Some(State::Tried { done: next, .. }) if next.priority != done.priority);
                if quiet == INTERVALS || gives_way {
                    self.forget(done.priority);
                }
                tried.unwrap_or_else(|| {
                    if self.is_known(done) {
                        return State::Helps { done, quiet, suffered };
                    }
                    // What earlier steps were worth is as old.
                    self.forget(done.priority);
                    State::nobody()
                })
            }
        };
    }

    /// What becomes of a trial that is over.
    fn judged(&mut self, done: Done, before: &Record, since: &Record) -> State {
        let finding = self.findings.entry(done).or_default();
        let helps = since.intervals == INTERVALS && self.rules.is_worth(done.steps, before, since);
        if since.intervals < INTERVALS {
            finding.put_off();
        } else {
            finding.again(&self.loads);
        }
        let steps = if helps { done.steps } else { done.steps - 1 };
        if steps == 0 {
            return State::nobody();
        }
        State::Helps { done: Done { steps, ..done }, quiet: 0, suffered: Vec::new() }
    }

    /// Whether what a trial of this found out is still true.
    fn is_known(&self, done: Done) -> bool {
        self.findings.get(&done).is_some_and(|finding| finding.holds(&self.loads))
    }

    /// What trials for the sake of this priority found out is true no longer.
    fn forget(&mut self, priority: u32) {
        let of = self.findings.iter_mut().filter(|(done, _)| done.priority == priority);
        of.for_each(|(_, finding)| finding.forget());
    }

    /// The next step for the sake of this priority, unless it is known what that is worth.
    fn next(&self, priority: u32) -> Option<Done> {
        let steps = self.done().filter(|done| done.priority == priority).map_or(1, |done| done.steps + 1);
        let next = Done { priority, steps };
        (steps <= self.rules.steps && !self.is_known(next)).then_some(next)
    }

    /// Who suffers after an interval, of these.
    fn suffering<'c>(&self, before: &Suffered, classes: impl Iterator<Item = &'c Class>) -> Suffered {
        let after = |class: &Class| {
            let before = before.iter().find(|(priority, _)| *priority == class.priority);
            let mut record = before.map(|(_, record)| *record).unwrap_or_default();
            record.add(class);
            (record.score > 0.0).then_some((class.priority, record))
        };
        classes.filter(|class| self.next(class.priority).is_some()).filter_map(after).collect()
    }

    /// A trial for the sake of the highest priority that has suffered for long enough.
    fn tried(&self, suffered: &Suffered) -> Option<State> {
        let &(priority, record) = suffered.iter().find(|(_, record)| record.score >= self.rules.after)?;
        let done = self.next(priority)?;
        Some(State::Tried { done, before: record, since: Record::default(), left_s: TRIAL_S })
    }
}

impl State {
    fn nobody() -> Self {
        Self::Nobody { suffered: Vec::new() }
    }
}
