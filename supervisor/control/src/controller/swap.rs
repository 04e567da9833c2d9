//! The hand-over's driver: performs what the machine decides, and tells it what happened.

use std::collections::VecDeque;
use std::time::Duration;

use shadowslice_policy::handover::{Action, Fact, Handover, PhaseName, Side};
use shadowslice_shared::boot::{BootRefusal, Purpose};
use shadowslice_shared::units::{Moment, Percent};

use super::events::Controller;
use super::outcome::Effect;
use super::primary::Primary;
use super::resize::ResizeRequest;
use crate::process::WorkerSaid;
use shadowslice_shared::errors;
use shadowslice_shared::ids::WorkerId;

/// How long a shadow waits before it is tried again, while memory is made free for it.
const MEMORY_PAUSE: Duration = Duration::from_millis(200);

/// A hand-over under way.
#[derive(Debug)]
pub(super) struct Swap {
    pub(super) machine: Handover,
    incumbent: Option<WorkerId>,
    pub(super) shadow: Option<WorkerId>,
    pub(super) from: Percent,
    pub(super) wanted: ResizeRequest,
    /// When a shadow for which there is no memory yet is tried again.
    spawn_again: Option<Moment>,
    /// Whether the shadow stood ready when it began.
    pub(super) at_once: bool,
    /// Whether the incumbent was told to go.
    dismissed: bool,
}

impl Swap {
    /// One that begins.
    pub(super) fn new(
        machine: Handover,
        incumbent: Option<WorkerId>,
        shadow: Option<WorkerId>,
        from: Percent,
        wanted: ResizeRequest,
    ) -> Self {
        let at_once = machine.phase() == PhaseName::Draining;
        Self { machine, incumbent, shadow, from, wanted, spawn_again: None, at_once, dismissed: false }
    }

    /// When the hand-over needs attention without another event.
    pub(super) fn due(&self) -> Option<Moment> {
        [self.machine.due(), self.spawn_again].into_iter().flatten().min()
    }

    /// Whether this worker is one of its two.
    pub(super) fn has(&self, worker: WorkerId) -> bool {
        self.side(worker).is_some()
    }

    fn side(&self, worker: WorkerId) -> Option<Side> {
        if self.shadow == Some(worker) {
            Some(Side::Shadow)
        } else if self.incumbent == Some(worker) {
            Some(Side::Incumbent)
        } else {
            None
        }
    }

    fn worker(&self, side: Side) -> Option<WorkerId> {
        match side {
            Side::Incumbent => self.incumbent,
            Side::Shadow => self.shadow,
        }
    }

    fn forget(&mut self, side: Side) {
        match side {
            Side::Incumbent => self.incumbent = None,
            Side::Shadow => self.shadow = None,
        }
    }

    /// Whether a shadow starts.
    pub(super) fn starts(&self) -> bool {
        self.shadow.is_some() && self.before_cut_over()
    }

    /// Whether the incumbent has not been relieved yet.
    fn before_cut_over(&self) -> bool {
        matches!(self.machine.phase(), PhaseName::Spawning | PhaseName::Warming)
    }

    /// The share that it will put in force. A hand-over that aborts counts too: it blocks another
    /// one.
    pub(super) fn coming(&self) -> Option<Percent> {
        match self.machine.phase() {
            PhaseName::Spawning | PhaseName::Warming | PhaseName::Draining | PhaseName::Aborting => {
                Some(self.wanted.share)
            }
            PhaseName::Probation | PhaseName::Retiring | PhaseName::Done | PhaseName::Aborted => None,
        }
    }

    /// The worker that it relieved, while that stands ready.
    pub(super) fn parked(&self) -> Option<WorkerId> {
        self.incumbent.filter(|_| self.machine.phase() == PhaseName::Probation)
    }

    /// Role and phase of one of its workers, for reports.
    pub(super) fn standing(&self, worker: WorkerId, primary: &Primary) -> (&'static str, &'static str) {
        let shadow = self.shadow == Some(worker);
        match (self.machine.phase(), shadow) {
            (PhaseName::Spawning, true) => ("shadow", "starting"),
            (PhaseName::Warming, true) => ("shadow", "warming"),
            (PhaseName::Draining, true) => ("shadow", "serving"),
            (PhaseName::Aborting | PhaseName::Aborted, true) => ("shadow", "stopping"),
            (PhaseName::Probation | PhaseName::Retiring | PhaseName::Done, true) => ("incumbent", "serving"),
            (PhaseName::Draining, false) => ("incumbent", "draining"),
            (PhaseName::Probation, false) => ("parked", "standing"),
            (PhaseName::Retiring | PhaseName::Done, false) => ("parked", "stopping"),
            (_, false) => primary.standing(worker),
        }
    }
}

impl Controller {
    /// Begins a hand-over to the wanted share, with a worker that is yet to be started.
    pub(super) fn begin_swap(&mut self, wanted: ResizeRequest) {
        let serves = matches!(self.primary, Primary::Serving { .. });
        let (machine, actions) = Handover::begin(self.now(), serves, self.context.timeouts);
        self.begin_with(machine, None, wanted);
        self.perform_all(actions);
    }

    /// Begins a hand-over, to `shadow` if there is one already. The caller performs its first
    /// actions.
    pub(super) fn begin_with(&mut self, machine: Handover, shadow: Option<WorkerId>, wanted: ResizeRequest) {
        tracing::info!(
            model = self.model.name,
            from = %self.share,
            to = %wanted.share,
            pid = shadow.and_then(|shadow| self.pid(shadow)),
            phase = %machine.phase(),
            "hand-over begins"
        );
        self.pipeline.begin_stall();
        self.effect = shadow.map(|shadow| Effect::awaited(shadow, &wanted));
        let incumbent = self.primary.worker();
        self.swap = Some(Swap::new(machine, incumbent, shadow, self.share, wanted));
    }

    /// Tells the machine a fact, and performs what follows from it.
    pub(super) fn feed(&mut self, fact: Fact) {
        let now = self.now();
        let Some(swap) = &mut self.swap else { return };
        let actions = swap.machine.on(fact, now);
        self.perform_all(actions);
    }

    pub(super) fn swap_on_time(&mut self, now: Moment) {
        let Some(swap) = &mut self.swap else { return };
        if swap.spawn_again.take_if(|again| *again <= now).is_some() {
            return self.perform_all(vec![Action::Spawn]);
        }
        if swap.machine.due().is_none_or(|due| due > now) {
            return;
        }
        if self.keeps_parked() {
            self.feed(Fact::Adopt);
        } else if let Some(swap) = &mut self.swap {
            let actions = swap.machine.on_time(now);
            self.perform_all(actions);
        }
    }

    /// Performs actions in order; facts that arise on the way are told afterwards.
    pub(super) fn perform_all(&mut self, actions: Vec<Action>) {
        let mut facts: VecDeque<Fact> =
            actions.into_iter().filter_map(|action| self.perform(action)).collect();
        while let Some(fact) = facts.pop_front() {
            let now = self.now();
            let Some(swap) = &mut self.swap else { break };
            let actions = swap.machine.on(fact, now);
            facts.extend(actions.into_iter().filter_map(|action| self.perform(action)));
        }
        if self.swap.is_none() {
            self.resize_next();
        }
    }

    fn perform(&mut self, action: Action) -> Option<Fact> {
        tracing::debug!(model = self.model.name, ?action, "hand-over");
        let worker = |side| self.swap.as_ref().and_then(|swap| swap.worker(side));
        match action {
            Action::Spawn => return self.spawn_shadow(),
            Action::Warm => {
                if let Some(shadow) = worker(Side::Shadow).and_then(|id| self.workers.get_mut(&id)) {
                    shadow.warm();
                }
            }
            Action::Route(side) => self.route(side),
            Action::Drain(side) => {
                if let Some(worker) = worker(side) {
                    self.pipeline.drain(worker);
                }
            }
            // The batches of a failed shadow come back at its death, when they are blamed for it.
            Action::Requeue(Side::Shadow) | Action::Park(_) => {}
            Action::Requeue(Side::Incumbent) => {
                if let Some(worker) = worker(Side::Incumbent) {
                    self.pipeline.requeue(worker);
                }
            }
            Action::Stop(side) => return self.send_away(side),
            Action::Kill(side) => match worker(side).and_then(|id| self.workers.get(&id)) {
                Some(worker) => worker.kill(),
                None => return Some(Fact::Exited(side)),
            },
            Action::Release(side) => self.release(side),
            Action::GiveUp(side) => self.give_up(side),
            Action::Complete => self.complete(),
            Action::Finish(outcome) => self.finish(outcome),
        }
        None
    }

    /// Without free memory, standing workers are called in, and the shadow waits for their end.
    fn spawn_shadow(&mut self) -> Option<Fact> {
        // The hand-over may have been given up meanwhile.
        let swap = self.swap.as_ref().filter(|swap| swap.machine.phase() == PhaseName::Spawning)?;
        let launched = self.launch(Purpose::Serve, swap.wanted.share, true);
        let makes_room = launched.as_ref().err().is_some_and(|error| self.make_room(error));
        let again = self.after(MEMORY_PAUSE);
        let swap = self.swap.as_mut()?;
        // At least half of the time for its spawn must be left to the shadow.
        let in_time = swap.machine.due().is_some_and(|due| again + self.context.timeouts.spawn / 2 < due);
        match launched {
            Ok(worker) => {
                self.effect = Some(Effect::awaited(worker, &swap.wanted));
                swap.shadow = Some(worker);
                None
            }
            Err(_) if makes_room && in_time => {
                swap.spawn_again = Some(again);
                None
            }
            Err(error) => Some(Fact::BootFailed(errors::chain(&error))),
        }
    }

    fn route(&mut self, side: Side) {
        let Some(swap) = &self.swap else { return };
        let (worker, from) = (swap.worker(side), swap.from);
        if side == Side::Incumbent {
            self.share_is(from);
        }
        match worker.filter(|worker| self.workers.contains_key(worker)) {
            Some(worker) => self.serve_with(worker),
            None => self.died(),
        }
    }

    /// Tells a worker to end; a worker that is gone already is reported as exited at once.
    fn send_away(&mut self, side: Side) -> Option<Fact> {
        let swap = self.swap.as_mut()?;
        swap.dismissed |= side == Side::Incumbent;
        match swap.worker(side).and_then(|id| self.workers.get_mut(&id)) {
            Some(worker) => worker.stop(),
            None => return Some(Fact::Exited(side)),
        }
        None
    }

    fn release(&mut self, side: Side) {
        let Some(swap) = &mut self.swap else { return };
        let (worker, parked) = (swap.worker(side), !swap.dismissed);
        swap.forget(side);
        if let Some(worker) = worker {
            self.released(worker, parked);
        }
    }

    fn give_up(&mut self, side: Side) {
        let Some(worker) = self.swap.as_ref().and_then(|swap| swap.worker(side)) else { return };
        tracing::error!(
            model = self.model.name,
            pid = self.pid(worker),
            "a worker outlives its kill, probably stuck in the kernel; its memory is not free until it ends"
        );
        self.pipeline.requeue(worker);
    }

    pub(super) fn shadow_said(&mut self, worker: WorkerId, said: WorkerSaid) {
        match said {
            WorkerSaid::Connected => self.feed(Fact::Connected),
            WorkerSaid::Warmed(warmed) => {
                self.attach(worker, &warmed);
                self.feed(Fact::Warmed);
            }
            WorkerSaid::Refused(refusal) => {
                let share = self.workers.get(&worker).map(|worker| worker.share);
                if let (BootRefusal::Proof { .. }, Some(share)) = (&refusal, share) {
                    self.answers_wrongly(share);
                }
                self.feed(Fact::BootFailed(refusal.to_string()));
            }
            // Its exit follows.
            WorkerSaid::Lost(_) | WorkerSaid::Loaded(_) | WorkerSaid::Exited(_) => {}
        }
    }

    pub(super) fn swap_exited(&mut self, worker: WorkerId) {
        let Some(swap) = &mut self.swap else { return };
        if let Some(side) = swap.side(worker) {
            swap.forget(side);
            self.feed(Fact::Exited(side));
        }
    }

    pub(super) fn swap_misbehaved(&mut self, worker: WorkerId) {
        if self.swap.as_ref().is_some_and(|swap| swap.shadow == Some(worker)) {
            self.feed(Fact::Misbehaved);
        }
    }

    /// The incumbent that the hand-over began with died, and this is its replacement (or none yet).
    pub(super) fn swap_incumbent_is(&mut self, worker: Option<WorkerId>) {
        if let Some(swap) = self.swap.as_mut().filter(|swap| swap.before_cut_over()) {
            swap.incumbent = worker;
            swap.from = self.share;
        }
    }

    /// The replacement serves.
    pub(super) fn swap_incumbent_serves(&mut self) {
        if self.swap.as_ref().is_some_and(Swap::before_cut_over) {
            self.feed(Fact::IncumbentServes);
        }
    }

    pub(super) fn swap_drained(&mut self, worker: WorkerId) {
        if self.swap.as_ref().is_some_and(|swap| swap.incumbent == Some(worker)) {
            self.feed(Fact::Drained);
        }
    }
}
