//! A model's workers and their driver, with a virtual clock.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::time::Duration;

use shadowslice_policy::workers::{Action, LifecycleEvent, Workers};
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::Timestamp;

use crate::ledger::Ledger;
use crate::process::{Process, ProcessStep};
use crate::random::Random;
use crate::rules::{RuleChecker, Situations, Stimulus, Violation};
use crate::script::{Afterwards, ExternalEvent, Script};

/// A run that violated a rule.
#[derive(Debug)]
pub(crate) struct SimulationFailure {
    pub(crate) at: Timestamp,
    pub(crate) rule: Violation,
}

impl fmt::Display for SimulationFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "after {:?}, this does not hold: {}", self.at.since_origin(), self.rule)
    }
}

pub(crate) enum WorldEvent {
    /// An event of a worker reaches the state machine.
    News(WorkerId, LifecycleEvent),
    Process(WorkerId, ProcessStep),
    External(ExternalEvent),
    Timer,
}

/// The maximum number of consecutive timers at the same time.
const AT_ONCE: usize = 3;

pub(crate) struct World {
    pub(crate) script: Script,
    pub(crate) random: Random,
    pub(crate) workers: Workers,
    pub(crate) rules: RuleChecker,
    pub(crate) ledger: Option<Ledger>,
    pub(crate) processes: BTreeMap<WorkerId, Process>,
    pub(crate) routed: Option<WorkerId>,
    pub(crate) now: Timestamp,
    /// The events that must be reported before all others.
    pub(crate) at_once: VecDeque<LifecycleEvent>,
    /// The number of the last request.
    pub(crate) number: u64,
    /// True in the last part of the run, after all faults and orders.
    pub(crate) calm: bool,
    pub(crate) stopped: bool,
    /// The future events, ordered by time. The number in the key makes keys unique, and preserves the
    /// order of events at the same time.
    events: BTreeMap<(Timestamp, u64), WorldEvent>,
    scheduled: u64,
    timer_set_for: Option<Timestamp>,
    verbose: bool,
}

/// Runs one seed to its end, and returns the situations that occurred.
pub(crate) fn simulate(seed: u64, verbose: bool) -> Result<Situations, SimulationFailure> {
    let mut random = Random::new(seed);
    let script = Script::draw(seed, &mut random);
    if verbose {
        println!("{script:#?}");
    }
    let division = script.division.clone();
    let ledger =
        division.as_ref().map(|division| Ledger::new(division.count(), division.groups_of(script.share)));
    let division = division.ok_or_else(|| "scripted".to_owned());
    let mut world = World {
        workers: Workers::new(script.settings.clone(), script.share, script.held, division),
        rules: RuleChecker::new(&script),
        ledger,
        script,
        random,
        processes: BTreeMap::new(),
        routed: None,
        now: Timestamp::default(),
        at_once: VecDeque::new(),
        number: 0,
        calm: false,
        stopped: false,
        events: BTreeMap::new(),
        scheduled: 0,
        timer_set_for: None,
        verbose,
    };
    match world.run() {
        Ok(()) => Ok(world.rules.situations()),
        Err(rule) => Err(SimulationFailure { at: world.now, rule }),
    }
}

impl World {
    fn run(&mut self) -> Result<(), Violation> {
        for (when, happening) in std::mem::take(&mut self.script.happenings) {
            self.schedule(when, WorldEvent::External(happening));
        }
        self.begin()?;
        let end = Timestamp::default() + self.script.span;
        self.run_until(end)?;
        self.calm = true;
        self.calms_down()?;
        let bound = self.rules.bound_of_rest();
        self.run_until(end + bound)?;
        self.now = end + bound;
        if !self.stopped {
            self.rules.rest(&self.workers, self.script.afterwards)?;
            self.tell(LifecycleEvent::Stop)?;
            self.stopped = true;
            self.run_until(end + 2 * bound)?;
        }
        self.rules.ended(&self.workers)
    }

    /// Runs all events up to the time `end`.
    fn run_until(&mut self, end: Timestamp) -> Result<(), Violation> {
        while let Some(event) = self.events.first_entry().filter(|event| event.key().0 <= end) {
            let ((at, _), event) = event.remove_entry();
            self.now = at;
            self.handle(event)?;
        }
        Ok(())
    }

    fn begin(&mut self) -> Result<(), Violation> {
        let groups = self.ledger.as_ref().map(|ledger| LifecycleEvent::Groups(ledger.now()));
        let (before, after) = if self.random.percent(50) { (groups, None) } else { (None, groups) };
        if let Some(groups) = before {
            self.tell(groups)?;
        }
        let fault = self.script.fault.then(|| "scripted".to_owned());
        let actions = self.workers.begin(fault, self.now);
        self.at_once.extend(after);
        self.perform(&Stimulus::Begin, actions)?;
        self.tell_at_once()
    }

    fn handle(&mut self, event: WorldEvent) -> Result<(), Violation> {
        match event {
            WorldEvent::News(worker, fact) => self.news(worker, fact),
            WorldEvent::Process(worker, next) => {
                self.goes_on(worker, next);
                Ok(())
            }
            WorldEvent::External(_) if self.calm || self.stopped => Ok(()),
            WorldEvent::External(happening) => self.happens(happening),
            WorldEvent::Timer => self.timer(),
        }
    }

    fn news(&mut self, worker: WorkerId, fact: LifecycleEvent) -> Result<(), Violation> {
        let silent = self.is_silent();
        let process = self.process(worker);
        let is_exit = matches!(fact, LifecycleEvent::Exited { .. });
        if process.exit_told || (silent && !(is_exit && process.killed)) {
            return Ok(());
        }
        process.exit_told = is_exit;
        self.tell(fact)
    }

    /// Reports an event, and then the events that it immediately caused.
    pub(crate) fn tell(&mut self, fact: LifecycleEvent) -> Result<(), Violation> {
        self.tell_one(fact)?;
        self.tell_at_once()
    }

    fn tell_at_once(&mut self) -> Result<(), Violation> {
        while let Some(fact) = self.at_once.pop_front() {
            self.tell_one(fact)?;
        }
        Ok(())
    }

    fn tell_one(&mut self, fact: LifecycleEvent) -> Result<(), Violation> {
        let actions = self.workers.on(fact.clone(), self.now);
        self.perform(&Stimulus::LifecycleEvent(fact), actions)
    }

    pub(crate) fn timer(&mut self) -> Result<(), Violation> {
        for _ in 0..AT_ONCE {
            let due = self.workers.due();
            let actions = self.workers.on_timer(self.now);
            self.perform(&Stimulus::Timer { due }, actions)?;
            self.tell_at_once()?;
            if self.workers.due().is_none_or(|due| due > self.now) {
                return Ok(());
            }
        }
        Err("everything that is due is done on time".to_owned())
    }

    fn perform(&mut self, stimulus: &Stimulus, actions: Vec<Action>) -> Result<(), Violation> {
        self.log(stimulus, &actions);
        self.rules.step(stimulus, &actions, &self.workers, self.now)?;
        for action in actions {
            self.carry_out(action);
        }
        // Timers are never cancelled, so that outdated timers also fire.
        if let Some(due) = self.workers.due()
            && self.timer_set_for != Some(due)
        {
            self.timer_set_for = Some(due);
            self.schedule(due.since(self.now) + self.script.timer_lateness, WorldEvent::Timer);
        }
        Ok(())
    }

    /// Returns true if faults may occur now.
    pub(crate) fn is_troubled(&self) -> bool {
        !self.script.faultless && !self.calm
    }

    pub(crate) fn is_silent(&self) -> bool {
        self.calm && self.script.afterwards == Afterwards::FallsSilent
    }

    pub(crate) fn process(&mut self, worker: WorkerId) -> &mut Process {
        self.processes.get_mut(&worker).expect("only workers that were started are named")
    }

    pub(crate) fn schedule(&mut self, after: Duration, event: WorldEvent) {
        self.events.insert((self.now + after, self.scheduled), event);
        self.scheduled += 1;
    }

    fn log(&self, stimulus: &Stimulus, actions: &[Action]) {
        if self.verbose {
            let at = self.now.since_origin();
            println!("{at:>12.3?}  {:?} {:?}", self.workers.state(), self.workers.share());
            println!("              {stimulus:?}");
            for action in actions {
                println!("                  {action:?}");
            }
        }
    }
}
