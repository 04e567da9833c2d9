//! A model's hand-overs, by the supervisor's own state machine. Workers start in the time that the
//! scenario says, and none fails.

use std::time::Duration;

use shadowslice_policy::handover::{Action, Fact, Handover, PhaseName, Side, Timeouts};
use shadowslice_policy::sharing::Change;
use shadowslice_shared::contention::Occupant;
use shadowslice_shared::units::Sms;

use super::model::{Model, id};
use super::{Stage, Timer, timer};
use crate::time::{NEVER, at_ns, moment, ns};

/// A time limit that is never reached.
const LONG: Duration = Duration::from_secs(24 * 3600);

/// A hand-over that is under way.
#[derive(Debug)]
pub(super) struct Under {
    machine: Handover,
    /// The worker that served when it began.
    incumbent: usize,
    /// The share that it brings.
    to: Sms,
}

impl Under {
    fn worker(&self, side: Side) -> usize {
        if side == Side::Incumbent { self.incumbent } else { 1 - self.incumbent }
    }
}

impl Model<'_> {
    /// The share in force.
    pub(super) fn share(&self) -> Sms {
        self.workers[self.serving].sms
    }

    /// The share that a hand-over under way brings, or has just brought.
    pub(super) fn coming(&self) -> Option<Sms> {
        let under = self.under.as_ref()?;
        let comes =
            matches!(under.machine.phase(), PhaseName::Spawning | PhaseName::Warming | PhaseName::Draining);
        comes.then_some(under.to)
    }

    /// The share of the worker that stands ready.
    pub(super) fn standing(&self) -> Option<Sms> {
        let under = self.under.as_ref().filter(|under| under.machine.phase() == PhaseName::Probation)?;
        Some(self.workers[under.incumbent].sms)
    }

    /// Begins a hand-over, unless one is under way: to the worker that stands ready, or to a new
    /// one once that has gone.
    pub(super) fn change(&mut self, change: &Change, gpu: Sms, now: u64, stage: &mut Stage<'_>) {
        let to = Sms(change.to.0.clamp(Sms::STEP.min(gpu.0), gpu.0));
        if self.coming().is_some() || to == self.share() {
            return;
        }
        let timeouts = Timeouts { spawn: LONG, warm: LONG, drain: LONG, dwell: stage.dwell, stop: LONG };
        let stands = self.standing() == Some(to);
        self.tell(if stands { Fact::Adopt } else { Fact::Reclaim }, now, stage);
        let (machine, actions) = match stands {
            true => Handover::begin_standing(moment(now), timeouts),
            false => Handover::begin(moment(now), true, timeouts),
        };
        self.under = Some(Under { machine, incumbent: self.serving, to });
        self.perform(actions, now, stage);
    }

    /// The shadow has come a step further.
    pub(super) fn shadow_came(&mut self, now: u64, stage: &mut Stage<'_>) {
        stage.timers.set(timer(self.index, Timer::Shadow), NEVER);
        let Some(under) = &self.under else { return };
        if under.machine.phase() == PhaseName::Spawning {
            return self.tell(Fact::Connected, now, stage);
        }
        let (shadow, to) = (under.worker(Side::Shadow), under.to);
        self.attach(shadow, to);
        stage.gpus.grant(self.workers[shadow].seat, Occupant::anywhere(to));
        self.tell(Fact::Warmed, now, stage);
    }

    /// The relieved worker has nothing left.
    pub(super) fn drained(&mut self, now: u64, stage: &mut Stage<'_>) {
        self.tell(Fact::Drained, now, stage);
    }

    /// A phase of the hand-over has lasted as long as it may.
    pub(super) fn phase_over(&mut self, now: u64, stage: &mut Stage<'_>) {
        let Some(under) = &mut self.under else { return };
        let actions = under.machine.on_time(moment(now));
        self.perform(actions, now, stage);
    }

    fn tell(&mut self, fact: Fact, now: u64, stage: &mut Stage<'_>) {
        let Some(under) = &mut self.under else { return };
        let actions = under.machine.on(fact, moment(now));
        self.perform(actions, now, stage);
    }

    fn perform(&mut self, actions: Vec<Action>, now: u64, stage: &mut Stage<'_>) {
        for action in actions {
            self.act(action, now, stage);
        }
        let due = self.under.as_ref().and_then(|under| under.machine.due());
        stage.timers.set(timer(self.index, Timer::Phase), due.map_or(NEVER, at_ns));
    }

    fn act(&mut self, action: Action, now: u64, stage: &mut Stage<'_>) {
        let Some(under) = &self.under else { return };
        let start = self.served.truth.start;
        match action {
            Action::Spawn => stage.timers.set(timer(self.index, Timer::Shadow), now + ns(start.process)),
            Action::Warm => {
                stage.timers.set(timer(self.index, Timer::Shadow), now + ns(start.load) + ns(start.warm));
            }
            Action::Route(side) => {
                self.serving = under.worker(side);
                self.scheduler.route(Some(id(self.serving)));
                self.share_changed(now);
                self.dispatch(now, stage);
            }
            Action::Drain(side) => {
                let worker = under.worker(side);
                if self.scheduler.drain(id(worker)) {
                    self.drained(now, stage);
                }
            }
            Action::Stop(side) | Action::Kill(side) => {
                let worker = under.worker(side);
                self.scheduler.detach(id(worker));
                self.tell(Fact::Exited(side), now, stage);
            }
            Action::Finish(_) => self.under = None,
            // A released worker is the shadow of the next hand-over. The rest is for workers that
            // fail or hang.
            Action::Release(_)
            | Action::Park(_)
            | Action::Complete
            | Action::Requeue(_)
            | Action::GiveUp(_) => {}
        }
    }

    /// Another share is in force.
    pub(super) fn share_changed(&mut self, now: u64) {
        self.since = now;
        self.repartitions.push(now);
    }
}
