//! The hand-overs of a model. They use the supervisor's state machine. Workers take the start times
//! of the scenario, and never fail.

use std::collections::VecDeque;
use std::time::Duration;

use shadowslice_policy::sharing::ShareChange;
use shadowslice_policy::workers::{
    Action, Cause, HandoverMode, Launch, LifecycleEvent, ResizeRequest, Settings, Timeouts, Workers,
};
use shadowslice_shared::boot::{WarmTime, WarmUpReport, WorkerPurpose};
use shadowslice_shared::contention::Occupant;
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::{Percent, Sms};

use super::model::{WorldModel, id};
use super::{SharedState, WorldTimer, timer};
use crate::time::{NEVER, at_ns, ns, timestamp};

/// A timeout that is longer than every simulation.
const LONG: Duration = Duration::from_secs(24 * 3600);

/// Returns the state machine of a model's workers.
pub(super) fn workers(name: &str, initial: Sms, gpu: Sms, dwell: Duration) -> Workers {
    let settings = Settings {
        model: name.to_owned(),
        min: Percent::smallest_for(Sms(1), gpu),
        max: Percent::WHOLE,
        handover: HandoverMode::Shadow,
        standby: false,
        timeouts: Timeouts { spawn: LONG, warm: LONG, drain: LONG, dwell, stop: LONG },
        policy_acts: true,
        on_gpu: false,
        reference: WorkerPurpose::Reference,
        sms: Percent::all().map(|share| share.sms_of(gpu)).collect(),
    };
    Workers::new(settings, Percent::smallest_for(initial, gpu), false, Err("simulated".to_owned()))
}

impl WorldModel<'_> {
    /// Returns the share of the serving worker.
    pub(super) fn share(&self) -> Sms {
        self.workers[self.serving].sms
    }

    /// Returns the new share if a hand-over is in progress or has just taken effect.
    pub(super) fn coming(&self) -> Option<Sms> {
        self.machine.coming().map(|share| share.sms_of(self.gpu))
    }

    /// Returns the share of the standby worker, or `None` if there is none.
    pub(super) fn ready(&self) -> Option<Sms> {
        self.machine.ready_share().map(|share| share.sms_of(self.gpu))
    }

    /// Starts the first worker, which serves immediately.
    pub(super) fn begin(&mut self, shared: &mut SharedState<'_>) {
        let actions = self.machine.begin(None, timestamp(0));
        self.perform(actions, 0, shared);
        self.repartitions.clear();
    }

    /// Starts a hand-over, unless one is already in progress or the model sleeps. If the standby worker
    /// has the new share, the standby worker takes over. Otherwise, the standby worker stops, and a new
    /// worker starts.
    pub(super) fn change(&mut self, change: &ShareChange, now: u64, shared: &mut SharedState<'_>) {
        if !self.weights.is_awake() {
            return;
        }
        let share = Percent::smallest_for(change.to, self.gpu);
        let (cause, decided) = (Cause::Policy, timestamp(now));
        let request = ResizeRequest { number: None, share, cause, decided };
        self.report(LifecycleEvent::Resize { request, hold: false }, now, shared);
    }

    /// Reports the shadow's next event to the state machine.
    pub(super) fn shadow_progressed(&mut self, now: u64, shared: &mut SharedState<'_>) {
        shared.timers.set(timer(self.index, WorldTimer::Shadow), NEVER);
        let Some(fact) = self.shadow.take() else { return };
        self.report(fact, now, shared);
    }

    /// Reports to the state machine that a worker has no requests in flight.
    pub(super) fn drained(&mut self, worker: WorkerId, now: u64, shared: &mut SharedState<'_>) {
        self.report(LifecycleEvent::Drained(self.workers[worker.0 as usize].name), now, shared);
    }

    /// Reports to the state machine that the time limit of a phase has passed.
    pub(super) fn phase_over(&mut self, now: u64, shared: &mut SharedState<'_>) {
        let actions = self.machine.on_timer(timestamp(now));
        self.perform(actions, now, shared);
    }

    /// Reports an event to the state machine, and performs the actions that the state machine
    /// returns.
    fn report(&mut self, fact: LifecycleEvent, now: u64, shared: &mut SharedState<'_>) {
        let actions = self.machine.on(fact, timestamp(now));
        self.perform(actions, now, shared);
    }

    fn perform(&mut self, mut actions: Vec<Action>, now: u64, shared: &mut SharedState<'_>) {
        let mut facts = VecDeque::new();
        loop {
            for action in actions {
                facts.extend(self.act(action, now, shared));
            }
            let Some(fact) = facts.pop_front() else { break };
            actions = self.machine.on(fact, timestamp(now));
        }
        shared.timers.set(timer(self.index, WorldTimer::Phase), self.machine.due().map_or(NEVER, at_ns));
    }

    /// Performs an action, and returns the events that the action causes immediately.
    fn act(&mut self, action: Action, now: u64, shared: &mut SharedState<'_>) -> Vec<LifecycleEvent> {
        match action {
            Action::Start(Launch { worker, purpose, .. }) if purpose.is_reference() => {
                return vec![LifecycleEvent::ReferenceWritten { worker, result: Ok(()) }];
            }
            Action::Start(launch) => return self.start(launch, now, shared),
            Action::Load(worker) => {
                let warmed =
                    LifecycleEvent::Warmed { worker, warmed: Box::new(self.warmed(worker)), asked: None };
                if !self.serves() {
                    return vec![warmed];
                }
                let start = self.spec.truth.start;
                self.shadow = Some(warmed);
                shared
                    .timers
                    .set(timer(self.index, WorldTimer::Shadow), now + ns(start.load) + ns(start.warm));
            }
            Action::Attach { worker, slice, .. } => {
                let Some(seat) = self.seat_of(worker) else { return Vec::new() };
                shared.gpus.grant(self.workers[seat].seat, Occupant::anywhere(slice.sms));
                self.attach(seat, &slice);
            }
            Action::Route(worker) => {
                let Some(seat) = self.seat_of(worker) else { return Vec::new() };
                self.serving = seat;
                self.scheduler.route(Some(id(seat)));
                self.share_changed(now);
                self.dispatch(now, shared);
            }
            Action::Drain(worker) => {
                let idle = self.seat_of(worker).is_some_and(|seat| self.scheduler.drain(id(seat)));
                return if idle { vec![LifecycleEvent::Drained(worker)] } else { Vec::new() };
            }
            Action::Stop(worker) | Action::Kill(worker, _) => {
                if let Some(seat) = self.seat_of(worker) {
                    self.scheduler.detach(id(seat));
                    self.end_pauses(seat, now, shared);
                }
                return vec![LifecycleEvent::Exited {
                    worker,
                    status: "stopped by the supervisor".to_owned(),
                    idle: true,
                }];
            }
            // All other actions concern failed workers, partitions and reports. None of these are
            // simulated.
            _ => {}
        }
        Vec::new()
    }

    /// Starts a worker. The first worker connects immediately. A shadow connects after its start
    /// time.
    fn start(&mut self, launch: Launch, now: u64, shared: &mut SharedState<'_>) -> Vec<LifecycleEvent> {
        let seat = if launch.low_priority { 1 - self.serving } else { self.serving };
        self.workers[seat].name = launch.worker;
        let connected = LifecycleEvent::Connected(launch.worker);
        if !launch.low_priority {
            return vec![connected];
        }
        self.shadow = Some(connected);
        let process = self.spec.truth.start.process;
        shared.timers.set(timer(self.index, WorldTimer::Shadow), now + ns(process));
        Vec::new()
    }

    fn serves(&self) -> bool {
        self.scheduler.serving_lane().is_some()
    }

    fn warmed(&self, worker: WorkerId) -> WarmUpReport {
        let sms = self.machine.share_of(worker).map_or(Sms(0), |share| share.sms_of(self.gpu));
        let times = self.times(sms).into_iter().map(|(rows, took)| WarmTime { rows, took, error: 0.0 });
        WarmUpReport { times: times.collect(), ..WarmUpReport::default() }
    }

    fn seat_of(&self, worker: WorkerId) -> Option<usize> {
        self.workers.iter().position(|seated| seated.name == worker)
    }

    /// Records that the share has changed.
    pub(super) fn share_changed(&mut self, now: u64) {
        self.since = now;
        self.repartitions.push(now);
    }
}
