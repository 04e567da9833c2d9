//! A model of the world: the supervisor's scheduler, and two workers that execute its batches.

use std::time::Duration;

use shadowslice_policy::latency::Predictor;
use shadowslice_policy::scheduler::{
    ExecutingBatch, Lane, NextAction, OutgoingBatch, QueuedRequest, Scheduler, SchedulerWait,
    SchedulingRules, Slice, Unanswered,
};
use shadowslice_policy::sharing::{AdmissionPolicy, ModelSnapshot};
use shadowslice_policy::tenants::TenantId;
use shadowslice_policy::workers::{LifecycleEvent, Workers};
use shadowslice_shared::batch::{IN_FLIGHT, MAX_REQUESTS};
use shadowslice_shared::contention::{ClientPriority, Occupant, SharedGpu};
use shadowslice_shared::groups::Groups;
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::pause::pieces;
use shadowslice_shared::profile::Execution;
use shadowslice_shared::units::{Sms, Timestamp};

use super::handover;
use super::partitions::InWorkerShare;
use super::residency::WorldWeights;
use super::tally::RequestTally;
use super::{SharedState, WorldTimer, timer};
use crate::scenario::ScenarioModel;
use crate::time::{NEVER, at_ns, ns, timestamp};

#[derive(Debug)]
pub(super) struct WorldWorker {
    pub(super) seat: usize,
    pub(super) sms: Sms,
    pub(super) name: WorkerId,
    /// The executing batch, as the board of pauses knows it.
    pub(super) reported: Option<ExecutingBatch>,
}

#[derive(Debug)]
pub(super) struct WorldModel<'a> {
    pub(super) spec: &'a ScenarioModel,
    pub(super) index: usize,
    slo_ns: u64,
    pub(super) scheduler: Scheduler<(), ()>,
    /// The serving worker, and a second worker that is either the standby worker or the shadow.
    pub(super) workers: [WorldWorker; 2],
    pub(super) serving: usize,
    pub(super) machine: Workers,
    /// The next event of the starting shadow.
    pub(super) shadow: Option<LifecycleEvent>,
    pub(super) gpu: Sms,
    /// The in-process share, or `None` if the model changes its share with hand-overs.
    pub(super) in_process: Option<InWorkerShare>,
    pub(super) since: u64,
    pub(super) repartitions: Vec<u64>,
    pub(super) tally: RequestTally,
    pub(super) weights: WorldWeights,
    /// The execution times that workers measure during their warm-up.
    measured: Execution,
    alarm: u64,
}

/// Returns the scheduler's ID of one of a model's two workers.
pub(super) fn id(worker: usize) -> WorkerId {
    WorkerId(worker as u64)
}

impl<'a> WorldModel<'a> {
    pub(super) fn new(spec: &'a ScenarioModel, index: usize, shared: &mut SharedState<'a>) -> Self {
        let terms = &spec.terms;
        let (sms, gpu) = (terms.initial, shared.gpus.gpu(terms.gpu).sms);
        let granted = Occupant::anywhere(sms).with_priority(ClientPriority::of(terms.priority));
        let worker = |which: WorldTimer| {
            let seat = shared.gpus.add_seat(terms.gpu, &spec.truth, granted, timer(index, which));
            WorldWorker { seat, sms, name: WorkerId(0), reported: None }
        };
        let workers = [WorldTimer::FirstWorker, WorldTimer::SecondWorker].map(worker);
        let rules = SchedulingRules {
            slo: terms.slo,
            next_slo: None,
            max_delay: spec.max_delay,
            reject_late: !spec.serve_late,
        };
        let mut scheduler = Scheduler::new(rules, spec.max_queued, timestamp(0));
        scheduler.set_model_limits(terms.max_batch.max(1), MAX_REQUESTS, None);
        let mut new = Self {
            spec,
            index,
            slo_ns: ns(terms.slo),
            scheduler,
            workers,
            serving: 0,
            machine: handover::workers(&terms.name, sms, gpu, shared.dwell),
            shadow: None,
            gpu,
            in_process: InWorkerShare::of(shared.gpus.gpu(terms.gpu), sms).filter(|_| spec.in_process),
            since: 0,
            repartitions: Vec::new(),
            tally: RequestTally::new(),
            weights: WorldWeights::new(spec.truth.memory),
            measured: spec.truth.execution.clone(),
            alarm: NEVER,
        };
        new.begin(shared);
        new
    }

    pub(super) fn attach(&mut self, worker: usize, slice: &Slice) {
        self.workers[worker].sms = slice.sms;
        let blank = Predictor::new(self.spec.terms.profile.as_ref(), slice.sms);
        let slots = u8::try_from(IN_FLIGHT).expect("two slots");
        self.scheduler.attach(Lane::new(id(worker), slice, blank, slots));
    }

    pub(super) fn slice(&self, groups: Groups, sms: Sms) -> Slice {
        Slice { groups, sms, times: self.times(sms), max_rows: None }
    }

    /// Returns the execution times of batches with 1, 2, 4, … rows, up to the largest batch.
    pub(super) fn times(&self, sms: Sms) -> Vec<(u32, Duration)> {
        let most = self.spec.terms.max_batch.max(1);
        let sizes = (0..).map(|power| 1_u32 << power).take_while(|&rows| rows < most).chain([most]);
        let time = |rows| (rows, self.spec.truth.execution.time(rows, f64::from(sms.0)));
        sizes.map(time).collect()
    }

    pub(super) fn arrive(&mut self, now: u64, shared: &mut SharedState<'_>) {
        let arrived = timestamp(now);
        self.tally.arrived += 1;
        let deadline = arrived + self.spec.terms.slo;
        let request = QueuedRequest {
            shape: (),
            rows: 1,
            arrived,
            deadline,
            expires: None,
            level: 1,
            tenant: TenantId::DEFAULT,
            alone: false,
            item: (),
        };
        match self.scheduler.accept(request, arrived) {
            Ok(_) => {
                self.weights.record_accepted(now);
                self.dispatch(now, shared);
            }
            Err(_) => self.refused(1, arrived),
        }
    }

    /// Counts requests that the scheduler refused.
    pub(super) fn refused(&mut self, count: usize, at: Timestamp) {
        self.tally.refused += count as u64;
        (0..count).for_each(|_| self.scheduler.record_unanswered(Unanswered::Overloaded, at));
    }

    /// Sends all batches that the scheduler can send now, and sets the timer for the next batch.
    pub(super) fn dispatch(&mut self, now: u64, shared: &mut SharedState<'_>) {
        self.continue_sleep(shared);
        let rest = loop {
            match self.scheduler.next(timestamp(now)) {
                NextAction::Wait(rest) => break rest,
                NextAction::Act(refused, sending) => {
                    self.refused(refused.len(), timestamp(now));
                    if let Some(sending) = sending {
                        self.send(sending, now, shared);
                    }
                }
            }
        };
        let alarm = match rest {
            SchedulerWait::Until(until) => at_ns(until),
            SchedulerWait::Asleep => self.await_wake(shared),
            SchedulerWait::Idle | SchedulerWait::NoLane => NEVER,
        };
        if alarm != self.alarm {
            self.alarm = alarm;
            shared.timers.set(timer(self.index, WorldTimer::Alarm), alarm);
        }
        self.announce_idle(shared);
        self.report_batches(now, shared);
    }

    fn send(&mut self, sending: OutgoingBatch<(), ()>, now: u64, shared: &mut SharedState<'_>) {
        let worker = sending.worker;
        if self.scheduler.confirm_sent(sending, timestamp(now)) && !self.weights.is_waking() {
            self.execute(worker, now, shared);
        }
    }

    /// Starts the worker's next batch on the GPU.
    pub(super) fn execute(&mut self, worker: WorkerId, now: u64, shared: &mut SharedState<'_>) {
        let front = self.scheduler.lane(worker).and_then(|lane| lane.in_flight().next());
        let Some((rows, groups)) = front.map(|batch| (batch.rows, batch.groups)) else { return };
        let seat = self.workers[worker.0 as usize].seat;
        if self.in_process.is_some() {
            shared.gpus.grant(seat, shared.gpus.gpu(self.spec.terms.gpu).occupant(groups));
        }
        let noise = shared.noise();
        shared.gpus.start(seat, rows, noise, now, &mut shared.timers);
    }

    /// Handles the timer of the batch that a worker executes, which is the first of the worker's batches
    /// in flight.
    pub(super) fn batch_progressed(&mut self, worker: usize, now: u64, shared: &mut SharedState<'_>) {
        let took = shared.gpus.progress(self.workers[worker].seat, now, &mut shared.timers);
        if let Some(took) = took {
            self.completed(worker, took, now, shared);
        }
    }

    /// Handles the end of a worker's batch, which took the time `took`.
    fn completed(&mut self, worker: usize, took: Duration, now: u64, shared: &mut SharedState<'_>) {
        let (seat, worker) = (self.workers[worker].seat, id(worker));
        let front =
            self.scheduler.lane(worker).and_then(|lane| lane.in_flight().next()).map(|batch| batch.id);
        let Some(batch) = front.and_then(|front| self.scheduler.take_batch(worker, front, timestamp(now)))
        else {
            return;
        };
        if self.scheduler.lane(worker).is_some_and(Lane::is_idle) {
            shared.gpus.leave(seat, now, &mut shared.timers);
        } else {
            self.execute(worker, now, shared);
        }
        for request in &batch.requests {
            let latency = timestamp(now).since(request.arrived);
            self.scheduler.record_answer(latency, timestamp(now));
            self.tally.answer(ns(latency), self.slo_ns);
        }
        self.scheduler.record_completion(worker, &batch, took);
        let may_yield = self.weights.record_answered(batch.requests.len());
        shared.sleep.is_due |= may_yield && shared.sleep.is_short;
        if self.scheduler.recycle(worker, batch.slot) {
            self.drained(worker, now, shared);
        }
        self.dispatch(now, shared);
    }

    /// Changes the model's admission control.
    pub(super) fn set_admission(
        &mut self,
        admission: AdmissionPolicy,
        now: u64,
        shared: &mut SharedState<'_>,
    ) {
        self.scheduler.set_admission(admission);
        self.dispatch(now, shared);
    }

    /// Returns the data about this model that the policy gets. `may_pause` is true if pauses are permitted.
    pub(super) fn live(&mut self, now: u64, gpu: &SharedGpu, may_pause: bool) -> ModelSnapshot {
        let longest = self.measured.time(self.spec.terms.max_batch, f64::from(gpu.sms.0));
        ModelSnapshot {
            share: self.in_process_share(gpu).unwrap_or(self.share()),
            share_since: timestamp(self.since),
            pending_share: self.coming(),
            standby_share: self.ready(),
            groups: self.in_process.map(|inside| inside.groups()),
            execution: Some(self.measured.clone()),
            held: false,
            can_pause: may_pause && self.spec.shared_process.is_none() && pieces(longest) > 1,
            observation: self.scheduler.observe(timestamp(now)),
        }
    }

    /// Returns the number of accepted requests that have no answer yet.
    pub(super) fn pending(&self) -> u64 {
        (self.scheduler.queued() + self.scheduler.in_flight()) as u64
    }
}
