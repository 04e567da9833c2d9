//! One model: the supervisor's own scheduler, and two workers that execute what it sends.

use std::time::Duration;

use shadowslice_policy::latency::Predictor;
use shadowslice_policy::scheduler::{
    Lane, NextAction, OutgoingBatch, QueuedRequest, Scheduler, SchedulerWait, SchedulingRules, Slice,
};
use shadowslice_policy::sharing::{AdmissionPolicy, ModelSnapshot};
use shadowslice_policy::workers::{LifecycleEvent, Workers};
use shadowslice_shared::batch::{IN_FLIGHT, MAX_REQUESTS};
use shadowslice_shared::contention::{ClientPriority, Gpu, Occupant};
use shadowslice_shared::groups::Groups;
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::profile::Execution;
use shadowslice_shared::units::Sms;

use super::handover;
use super::partitions::Inside;
use super::tally::Counts;
use super::{Stage, Timer, timer};
use crate::scenario::Served;
use crate::time::{NEVER, at_ns, moment, ns};

#[derive(Debug)]
pub(super) struct Worker {
    pub(super) seat: usize,
    pub(super) sms: Sms,
    pub(super) name: WorkerId,
}

#[derive(Debug)]
pub(super) struct Model<'a> {
    pub(super) served: &'a Served,
    pub(super) index: usize,
    slo_ns: u64,
    pub(super) scheduler: Scheduler<(), ()>,
    /// The worker that serves, and the one that did or is about to.
    pub(super) workers: [Worker; 2],
    pub(super) serving: usize,
    pub(super) machine: Workers,
    /// What the shadow that starts says next.
    pub(super) shadow: Option<LifecycleEvent>,
    pub(super) gpu: Sms,
    /// Where the share changes inside the worker.
    pub(super) inside: Option<Inside>,
    pub(super) since: u64,
    pub(super) repartitions: Vec<u64>,
    pub(super) tally: Counts,
    /// What workers measured before they served: times, and no kernels.
    proven: Execution,
    alarm: u64,
}

/// What the scheduler calls one of a model's two workers.
pub(super) fn id(worker: usize) -> WorkerId {
    WorkerId(worker as u64)
}

impl<'a> Model<'a> {
    pub(super) fn new(served: &'a Served, index: usize, stage: &mut Stage<'a>) -> Self {
        let terms = &served.terms;
        let (sms, gpu) = (terms.initial, stage.gpus.gpu(terms.gpu).sms);
        let granted = Occupant::anywhere(sms).with(ClientPriority::of(terms.priority));
        let worker = |which: Timer| {
            let seat = stage.gpus.add_seat(terms.gpu, &served.truth, granted, timer(index, which));
            Worker { seat, sms, name: WorkerId(0) }
        };
        let workers = [Timer::FirstWorker, Timer::SecondWorker].map(worker);
        let rules =
            SchedulingRules { slo: terms.slo, max_delay: served.max_delay, reject_late: !served.serve_late };
        let mut scheduler = Scheduler::new(rules, served.max_queued, moment(0));
        scheduler.set_model_limits(terms.max_batch.max(1), MAX_REQUESTS, None);
        let mut new = Self {
            served,
            index,
            slo_ns: ns(terms.slo),
            scheduler,
            workers,
            serving: 0,
            machine: handover::workers(&terms.name, sms, gpu, stage.dwell),
            shadow: None,
            gpu,
            inside: Inside::of(stage.gpus.gpu(terms.gpu), sms).filter(|_| served.in_process),
            since: 0,
            repartitions: Vec::new(),
            tally: Counts::new(),
            proven: served.truth.execution.clone(),
            alarm: NEVER,
        };
        new.begin(stage);
        new
    }

    pub(super) fn attach(&mut self, worker: usize, slice: &Slice) {
        self.workers[worker].sms = slice.sms;
        let blank = Predictor::new(self.served.terms.profile.as_ref(), slice.sms);
        let slots = u8::try_from(IN_FLIGHT).expect("two slots");
        self.scheduler.attach(Lane::new(id(worker), slice, blank, slots));
    }

    pub(super) fn slice(&self, groups: Groups, sms: Sms) -> Slice {
        Slice { groups, sms, times: self.times(sms), max_rows: None }
    }

    /// Of one row, of twice as many, up to the largest batch.
    pub(super) fn times(&self, sms: Sms) -> Vec<(u32, Duration)> {
        let most = self.served.terms.max_batch.max(1);
        let sizes = (0..).map(|power| 1_u32 << power).take_while(|&rows| rows < most).chain([most]);
        let time = |rows| (rows, self.served.truth.execution.time(rows, f64::from(sms.0)));
        sizes.map(time).collect()
    }

    pub(super) fn arrive(&mut self, now: u64, stage: &mut Stage<'_>) {
        let arrived = moment(now);
        self.tally.arrived += 1;
        let deadline = arrived + self.served.terms.slo;
        let request =
            QueuedRequest { shape: (), rows: 1, arrived, deadline, level: 1, alone: false, item: () };
        match self.scheduler.accept(request, arrived) {
            Ok(()) => self.dispatch(now, stage),
            Err(_) => self.tally.refused += 1,
        }
    }

    pub(super) fn dispatch(&mut self, now: u64, stage: &mut Stage<'_>) {
        let rest = loop {
            match self.scheduler.next(moment(now)) {
                NextAction::Wait(rest) => break rest,
                NextAction::Act(refused, sending) => {
                    self.tally.refused += refused.len() as u64;
                    if let Some(sending) = sending {
                        self.send(sending, now, stage);
                    }
                }
            }
        };
        let alarm = if let SchedulerWait::Until(until) = rest { at_ns(until) } else { NEVER };
        if alarm != self.alarm {
            self.alarm = alarm;
            stage.timers.set(timer(self.index, Timer::Alarm), alarm);
        }
    }

    fn send(&mut self, sending: OutgoingBatch<(), ()>, now: u64, stage: &mut Stage<'_>) {
        let worker = sending.worker;
        if self.scheduler.confirm_sent(sending, moment(now)) {
            self.execute(worker, now, stage);
        }
    }

    fn execute(&mut self, worker: WorkerId, now: u64, stage: &mut Stage<'_>) {
        let front = self.scheduler.lane(worker).and_then(|lane| lane.in_flight().next());
        let Some((rows, groups)) = front.map(|batch| (batch.rows, batch.groups)) else { return };
        let seat = self.workers[worker.0 as usize].seat;
        if self.inside.is_some() {
            stage.gpus.grant(seat, stage.gpus.gpu(self.served.terms.gpu).occupant(groups));
        }
        let noise = stage.noise();
        stage.gpus.start(seat, rows, noise, now, &mut stage.timers);
    }

    /// The first batch that a worker has is through.
    pub(super) fn completed(&mut self, worker: usize, now: u64, stage: &mut Stage<'_>) {
        let (seat, worker) = (self.workers[worker].seat, id(worker));
        let took = stage.gpus.finish(seat, now, &mut stage.timers);
        let front =
            self.scheduler.lane(worker).and_then(|lane| lane.in_flight().next()).map(|batch| batch.id);
        let Some(batch) = front.and_then(|front| self.scheduler.take_batch(worker, front, moment(now)))
        else {
            return;
        };
        if self.scheduler.lane(worker).is_some_and(Lane::is_idle) {
            stage.gpus.leave(seat, now, &mut stage.timers);
        } else {
            self.execute(worker, now, stage);
        }
        for request in &batch.requests {
            let latency = moment(now).since(request.arrived);
            self.scheduler.record_answer(latency);
            self.tally.answer(ns(latency), self.slo_ns);
        }
        self.scheduler.record_completion(worker, &batch, took);
        if self.scheduler.recycle(worker, batch.slot) {
            self.drained(worker, now, stage);
        }
        self.dispatch(now, stage);
    }

    pub(super) fn set_admission(&mut self, admission: AdmissionPolicy, now: u64, stage: &mut Stage<'_>) {
        self.scheduler.set_admission(admission);
        self.dispatch(now, stage);
    }

    pub(super) fn live(&mut self, now: u64, gpu: &Gpu) -> ModelSnapshot {
        ModelSnapshot {
            share: self.share_inside(gpu).unwrap_or(self.share()),
            share_since: moment(self.since),
            pending_share: self.coming(),
            standby_share: self.ready(),
            groups: self.inside.map(|inside| inside.groups()),
            execution: Some(self.proven.clone()),
            held: false,
            observation: self.scheduler.observe(moment(now)),
        }
    }

    /// Accepted requests without an answer.
    pub(super) fn pending(&self) -> u64 {
        (self.scheduler.queued() + self.scheduler.in_flight()) as u64
    }
}
