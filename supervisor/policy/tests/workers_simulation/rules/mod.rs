//! The rules of the simulation. After every step, the rules check the events, the actions and the
//! visible state.

mod answers;
mod boots;
mod deaths;
mod ends;
mod partitions;
mod record;
mod refusals;
mod rest;
mod shares;
mod standby;
mod traffic;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use shadowslice_policy::workers::{Action, LifecycleEvent, Settings, Workers, WorkersState};
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::Timestamp;

use crate::script::Script;
use answers::Answers;
use boots::Boots;
use deaths::Deaths;
use partitions::Partitions;
use record::WorkerRecord;
use refusals::Before;
use shares::Shares;
use standby::StandbyRules;

/// The name of the rule that was violated.
pub(crate) type Violation = String;

/// The situations that occurred in a run.
pub(crate) type Situations = BTreeSet<&'static str>;

/// The event or timer that causes a step of the state machine.
#[derive(Debug, PartialEq)]
pub(crate) enum Stimulus {
    Begin,
    LifecycleEvent(LifecycleEvent),
    /// A timer. `due` is the result of [`Workers::due`] before the timer fired.
    Timer {
        due: Option<Timestamp>,
    },
}

/// One step of the state machine.
pub(crate) struct Step<'s> {
    stimulus: &'s Stimulus,
    actions: &'s [Action],
    workers: &'s Workers,
    now: Timestamp,
}

/// Returns an error with the name of the rule unless `holds` is true.
fn rule(holds: bool, name: &str) -> Result<(), Violation> {
    if holds { Ok(()) } else { Err(name.to_owned()) }
}

pub(crate) struct RuleChecker {
    faultless: bool,
    settings: Settings,
    may_have_standby: bool,
    /// The maximum lateness of timers, plus a margin.
    allowance: Duration,
    workers: BTreeMap<WorkerId, WorkerRecord>,
    /// The worker that gets the traffic.
    routed: Option<WorkerId>,
    stopping: bool,
    /// True if the model was down before this step.
    down: bool,
    awaits: bool,
    was_ready: bool,
    was_asleep: bool,
    answers: Answers,
    shares: Shares,
    standby: StandbyRules,
    partitions: Partitions,
    deaths: Deaths,
    before: Before,
    boots: Boots,
    /// True if the share in force can no longer be used, because two workers answered wrongly at this
    /// share.
    wrong_for_good: bool,
    situations: Situations,
}

impl RuleChecker {
    pub(crate) fn new(script: &Script) -> Self {
        let settings = script.settings.clone();
        Self {
            faultless: script.faultless,
            may_have_standby: settings.standby,
            settings,
            allowance: script.timer_lateness + Duration::from_millis(1),
            workers: BTreeMap::new(),
            routed: None,
            stopping: false,
            down: true,
            awaits: false,
            was_ready: false,
            was_asleep: false,
            answers: Answers::new(script.held),
            shares: Shares::new(script.share),
            standby: StandbyRules::default(),
            partitions: Partitions::default(),
            deaths: Deaths::default(),
            before: Before::default(),
            boots: Boots::default(),
            wrong_for_good: false,
            situations: Situations::new(),
        }
    }

    pub(crate) fn situations(&mut self) -> Situations {
        std::mem::take(&mut self.situations)
    }

    /// Checks one step of the state machine.
    pub(crate) fn step(
        &mut self,
        stimulus: &Stimulus,
        actions: &[Action],
        workers: &Workers,
        now: Timestamp,
    ) -> Result<(), Violation> {
        let step = Step { stimulus, actions, workers, now };
        no_timer_acts_early(&step)?;
        self.learn(&step);
        self.before(&step)?;
        for action in actions {
            self.action(action, &step)?;
        }
        self.after(&step)?;
        self.workers.retain(|_, seen| !seen.gone);
        let state = workers.state();
        self.down = matches!(state, WorkersState::Down { .. });
        self.awaits = awaits(workers);
        self.was_ready = state == WorkersState::Ready;
        self.was_asleep = state == WorkersState::Asleep;
        self.look(workers);
        Ok(())
    }

    fn learn(&mut self, step: &Step<'_>) {
        let Stimulus::LifecycleEvent(fact) = step.stimulus else { return };
        match fact {
            LifecycleEvent::Stop => self.stopping = true,
            LifecycleEvent::Configured(settings) => {
                self.settings = settings.clone();
                self.may_have_standby |= settings.standby;
            }
            _ => self.hear_of_worker(fact, step.now),
        }
    }

    /// Checks the rules that depend only on the event, before the actions are checked.
    fn before(&mut self, step: &Step<'_>) -> Result<(), Violation> {
        self.asked(step);
        self.wrong_before(step);
        self.boots_before(step);
        self.refused_rightly(step)?;
        self.deaths_before(step);
        self.groups_before(step);
        self.partitions.moved_as = None;
        self.standby_before(step)
    }

    fn action(&mut self, action: &Action, step: &Step<'_>) -> Result<(), Violation> {
        if let Some(worker) = named(action) {
            rule(self.workers.contains_key(&worker), "actions name only existing workers")?;
        }
        match action {
            Action::Start(launch) => self.start(launch, step)?,
            Action::Load(worker) => self.load(*worker)?,
            Action::Attach { worker, slice, share, .. } => self.attach(*worker, slice, *share)?,
            Action::Route(worker) => self.route(*worker, step)?,
            Action::Drain(worker) => self.drain(*worker, step.now)?,
            Action::Requeue(worker) => self.requeue(*worker, step)?,
            Action::Condemn(worker) => self.condemn(*worker, step.now)?,
            Action::Stop(worker) => self.stop(*worker, step)?,
            Action::Kill(worker, _) => self.kill(*worker, step)?,
            Action::Prepare(worker, groups) => self.prepare(*worker, *groups, step)?,
            Action::Forget(worker, groups) => self.forget(*worker, *groups)?,
            Action::Move { worker, share, slice } => self.moved(*worker, *share, slice, step)?,
            Action::StandbyExists(stands) => self.standby.on = *stands,
            Action::Keep(worker) => self.keep(*worker, step)?,
            Action::Hurry(worker) => self.hurry(*worker)?,
            Action::AwaitEffect(worker, request) => self.await_effect(*worker, *request),
            Action::MeasureStall { outage } => self.shares.stall = Some(*outage),
            Action::Report(report) => self.report(report, step)?,
            Action::NeedsShadows => self.needs_shadows(step)?,
            Action::AskGroups { count, .. } => self.ask_groups(*count),
            Action::Shut(_) => self.workers.values_mut().for_each(|seen| seen.busy = false),
            Action::StayAwake(_) => {}
        }
        Ok(())
    }

    /// Checks the rules that must hold between two steps.
    fn after(&mut self, step: &Step<'_>) -> Result<(), Violation> {
        for worker in self.workers.iter().filter(|(_, seen)| !seen.gone).map(|(worker, _)| worker) {
            rule(step.workers.has(*worker), "no worker is forgotten")?;
        }
        self.roles(step);
        self.traffic_flows(step)?;
        self.sleep_is_kept(step)?;
        self.not_too_many(step)?;
        self.nothing_is_overdue(step)?;
        self.all_are_answered(step)?;
        self.share_is_told(step)?;
        self.memory_is_told(step)?;
        self.partitions_fit(step)?;
        self.deaths_count(step)?;
        self.wrong_after(step)?;
        self.boots_after(step)?;
        if self.faultless { self.all_is_well(step) } else { Ok(()) }
    }

    fn note(&mut self, situation: &'static str) {
        self.situations.insert(situation);
    }

    fn seen(&mut self, worker: WorkerId) -> &mut WorkerRecord {
        self.workers.get_mut(&worker).expect("it was looked up before")
    }
}

/// Returns the worker that an action applies to, if the action requires an existing worker.
fn named(action: &Action) -> Option<WorkerId> {
    match action {
        Action::Load(worker)
        | Action::Attach { worker, .. }
        | Action::Route(worker)
        | Action::Drain(worker)
        | Action::Requeue(worker)
        | Action::Condemn(worker)
        | Action::Hurry(worker)
        | Action::Stop(worker)
        | Action::Kill(worker, _)
        | Action::Prepare(worker, _)
        | Action::Forget(worker, _)
        | Action::Move { worker, .. }
        | Action::Keep(worker)
        | Action::AwaitEffect(worker, _) => Some(*worker),
        Action::Start(_) | Action::Shut(_) | Action::AskGroups { .. } | Action::StayAwake(_) => None,
        Action::StandbyExists(_) | Action::NeedsShadows | Action::MeasureStall { .. } | Action::Report(_) => {
            None
        }
    }
}

/// Returns true if the model waits for a standby that is still starting.
fn awaits(workers: &Workers) -> bool {
    matches!(workers.state(), WorkersState::Waiting(why) if why.contains("standby is still starting"))
}

fn no_timer_acts_early(step: &Step<'_>) -> Result<(), Violation> {
    let Stimulus::Timer { due } = step.stimulus else { return Ok(()) };
    let early = due.is_none_or(|due| due > step.now);
    let same = step.actions.is_empty() && step.workers.due() == *due;
    rule(!early || same, "an early timer changes nothing")
}
