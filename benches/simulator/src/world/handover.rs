//! A model's workers, by the supervisor's own state machine. They start in the time that the
//! scenario says, and none fails.

use std::collections::VecDeque;
use std::time::Duration;

use shadowslice_policy::sharing::ShareChange;
use shadowslice_policy::workers::{
    Action, Cause, HandoverMode, Launch, LifecycleEvent, ResizeRequest, Settings, Timeouts, Workers,
};
use shadowslice_shared::boot::{Purpose, WarmTime, Warmed};
use shadowslice_shared::contention::Occupant;
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::{Percent, Sms};

use super::model::{Model, id};
use super::{Stage, Timer, timer};
use crate::time::{NEVER, at_ns, moment, ns};

const LONG: Duration = Duration::from_secs(24 * 3600);

pub(super) fn workers(name: &str, initial: Sms, gpu: Sms, dwell: Duration) -> Workers {
    let settings = Settings {
        model: name.to_owned(),
        min: Percent::yielding(Sms(1), gpu),
        max: Percent::WHOLE,
        handover: HandoverMode::Shadow,
        standby: false,
        timeouts: Timeouts { spawn: LONG, warm: LONG, drain: LONG, dwell, stop: LONG },
        policy_acts: true,
        on_gpu: false,
        reference: Purpose::Reference,
        sms: Percent::all().map(|share| share.sms_of(gpu)).collect(),
    };
    Workers::new(settings, Percent::yielding(initial, gpu), false, Err("simulated".to_owned()))
}

impl Model<'_> {
    pub(super) fn share(&self) -> Sms {
        self.workers[self.serving].sms
    }

    /// By a hand-over under way, or one that has just come to effect.
    pub(super) fn coming(&self) -> Option<Sms> {
        self.machine.coming().map(|share| share.sms_of(self.gpu))
    }

    pub(super) fn ready(&self) -> Option<Sms> {
        self.machine.ready_share().map(|share| share.sms_of(self.gpu))
    }

    /// The first worker serves, at once.
    pub(super) fn begin(&mut self, stage: &mut Stage<'_>) {
        let actions = self.machine.begin(None, moment(0));
        self.perform(actions, 0, stage);
        self.repartitions.clear();
    }

    /// Unless a hand-over is under way: to the worker that stands ready, or to a new one once that
    /// has gone.
    pub(super) fn change(&mut self, change: &ShareChange, now: u64, stage: &mut Stage<'_>) {
        let share = Percent::yielding(change.to, self.gpu);
        let (cause, decided) = (Cause::Policy, moment(now));
        let request = ResizeRequest { number: None, share, cause, decided };
        self.tell(LifecycleEvent::Resize { request, hold: false }, now, stage);
    }

    pub(super) fn shadow_came(&mut self, now: u64, stage: &mut Stage<'_>) {
        stage.timers.set(timer(self.index, Timer::Shadow), NEVER);
        let Some(fact) = self.shadow.take() else { return };
        self.tell(fact, now, stage);
    }

    pub(super) fn drained(&mut self, worker: WorkerId, now: u64, stage: &mut Stage<'_>) {
        self.tell(LifecycleEvent::Drained(self.workers[worker.0 as usize].name), now, stage);
    }

    pub(super) fn phase_over(&mut self, now: u64, stage: &mut Stage<'_>) {
        let actions = self.machine.on_timer(moment(now));
        self.perform(actions, now, stage);
    }

    fn tell(&mut self, fact: LifecycleEvent, now: u64, stage: &mut Stage<'_>) {
        let actions = self.machine.on(fact, moment(now));
        self.perform(actions, now, stage);
    }

    fn perform(&mut self, mut actions: Vec<Action>, now: u64, stage: &mut Stage<'_>) {
        let mut facts = VecDeque::new();
        loop {
            for action in actions {
                facts.extend(self.act(action, now, stage));
            }
            let Some(fact) = facts.pop_front() else { break };
            actions = self.machine.on(fact, moment(now));
        }
        stage.timers.set(timer(self.index, Timer::Phase), self.machine.due().map_or(NEVER, at_ns));
    }

    /// Returns what the action brings about at once.
    fn act(&mut self, action: Action, now: u64, stage: &mut Stage<'_>) -> Vec<LifecycleEvent> {
        match action {
            Action::Start(Launch { worker, purpose, .. }) if purpose.is_reference() => {
                return vec![LifecycleEvent::ReferenceWritten { worker, result: Ok(()) }];
            }
            Action::Start(launch) => return self.start(launch, now, stage),
            Action::Load(worker) => {
                let warmed = LifecycleEvent::Warmed { worker, warmed: self.warmed(worker), asked: None };
                if !self.serves() {
                    return vec![warmed];
                }
                let start = self.served.truth.start;
                self.shadow = Some(warmed);
                stage.timers.set(timer(self.index, Timer::Shadow), now + ns(start.load) + ns(start.warm));
            }
            Action::Attach { worker, slice, .. } => {
                let Some(seat) = self.seat_of(worker) else { return Vec::new() };
                stage.gpus.grant(self.workers[seat].seat, Occupant::anywhere(slice.sms));
                self.attach(seat, &slice);
            }
            Action::Route(worker) => {
                let Some(seat) = self.seat_of(worker) else { return Vec::new() };
                self.serving = seat;
                self.scheduler.route(Some(id(seat)));
                self.share_changed(now);
                self.dispatch(now, stage);
            }
            Action::Drain(worker) => {
                let idle = self.seat_of(worker).is_some_and(|seat| self.scheduler.drain(id(seat)));
                return if idle { vec![LifecycleEvent::Drained(worker)] } else { Vec::new() };
            }
            Action::Stop(worker) | Action::Kill(worker, _) => {
                if let Some(seat) = self.seat_of(worker) {
                    self.scheduler.detach(id(seat));
                }
                return vec![LifecycleEvent::Exited {
                    worker,
                    status: "it was told to".to_owned(),
                    idle: true,
                }];
            }
            // The rest is for workers that fail, for partitions, and for reports.
            _ => {}
        }
        Vec::new()
    }

    /// The first worker is there at once, a shadow after a while.
    fn start(&mut self, launch: Launch, now: u64, stage: &mut Stage<'_>) -> Vec<LifecycleEvent> {
        let seat = if launch.low_priority { 1 - self.serving } else { self.serving };
        self.workers[seat].name = launch.worker;
        let connected = LifecycleEvent::Connected(launch.worker);
        if !launch.low_priority {
            return vec![connected];
        }
        self.shadow = Some(connected);
        let process = self.served.truth.start.process;
        stage.timers.set(timer(self.index, Timer::Shadow), now + ns(process));
        Vec::new()
    }

    fn serves(&self) -> bool {
        self.scheduler.serving_lane().is_some()
    }

    fn warmed(&self, worker: WorkerId) -> Warmed {
        let sms = self.machine.share_of(worker).map_or(Sms(0), |share| share.sms_of(self.gpu));
        let times = self.times(sms).into_iter().map(|(rows, took)| WarmTime { rows, took, error: 0.0 });
        Warmed { times: times.collect(), ..Warmed::default() }
    }

    fn seat_of(&self, worker: WorkerId) -> Option<usize> {
        self.workers.iter().position(|seated| seated.name == worker)
    }

    pub(super) fn share_changed(&mut self, now: u64) {
        self.since = now;
        self.repartitions.push(now);
    }
}
