//! The way of one model's requests to batches on its workers' lanes: what waits, what is refused,
//! what runs together, when and where.
//!
//! ```text
//! accept ─▶ admission ─▶ queues ─▶ next: refuse these, send that ─▶ sent ─▶ lane ─▶ take, completed, recycle
//!                      ▲                                                │
//!                      └──────────── put_back ◀─ take_back ◀────────────┘
//! ```
//!
//! The scheduler is told what happens and when, and says what to do. Its driver does that: the
//! supervisor with sockets and slabs, the simulator with a virtual clock. After anything that may
//! let a batch go, the driver asks for what is [`next`](Scheduler::next) until nothing is.

mod admission;
pub mod batcher;
mod deadline;
mod lane;
mod messages;
mod observe;
mod overload;
pub mod queue;
mod queues;
#[cfg(test)]
mod tests;
mod write_time;

use std::time::Duration;

use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::Timestamp;

use crate::sharing::{AdmissionPolicy, Observation};

pub use lane::{AbandonedRequests, BatchInFlight, Lane, Slice};
pub use messages::{
    CompletedBatch, NextAction, OutgoingBatch, RefusalReason, RefusedRequest, SchedulerWait, SchedulingRules,
    Ticket,
};
pub use queue::{QueuedRequest, SUSPECT_LEVEL};

use admission::AdmissionControl;
use batcher::{BatchLimits, FormedBatch};
use lane::Duty;
use observe::Observer;
use overload::OverloadDetector;
use queues::PriorityQueues;

/// Given-up requests are taken out of the queue once they may be one in so many: so for each, about
/// as many requests are looked at.
const GIVEN_UP_ONE_IN: usize = 8;

/// `K` is the shape of a request.
#[derive(Debug)]
pub struct Scheduler<K, T> {
    slo: Duration,
    admission: AdmissionControl,
    queues: PriorityQueues<K, T>,
    /// Queued requests that clients may have given up; some of these may execute.
    given_up: usize,
    lanes: Vec<Lane<K, T>>,
    /// `None`: late requests are served.
    overload: Option<OverloadDetector>,
    observer: Observer,
    next_batch: u64,
    /// That a lane has at a time; `None` for a model that gives one answer to a request.
    streams: Option<u32>,
    /// A stream has begun since the last step.
    step_is_next: bool,
}

impl<K: Ord + Clone, T: Ticket> Scheduler<K, T> {
    pub fn new(rules: SchedulingRules, max_requests: usize, now: Timestamp) -> Self {
        let SchedulingRules { slo, max_delay, reject_late } = rules;
        let limits = BatchLimits { max_rows: 0, max_requests: 1, max_delay };
        Self {
            slo,
            admission: AdmissionControl::new(limits, !reject_late),
            queues: PriorityQueues::new(max_requests),
            given_up: 0,
            lanes: Vec::new(),
            overload: reject_late.then(|| OverloadDetector::new(slo)),
            observer: Observer::new(now),
            next_batch: 0,
            streams: None,
            step_is_next: false,
        }
    }

    /// What the model allows; no rows where it has no batch axis, and no streams where it gives one
    /// answer to a request.
    pub fn set_model_limits(&mut self, max_rows: u32, max_requests: usize, streams: Option<u32>) {
        self.admission.set_model_limits(max_rows, max_requests);
        self.streams = streams;
    }

    /// Requests that wait keep their deadlines.
    pub fn set_rules(&mut self, rules: SchedulingRules) {
        let SchedulingRules { slo, max_delay, reject_late } = rules;
        if self.slo != slo || self.overload.is_some() != reject_late {
            self.overload = reject_late.then(|| OverloadDetector::new(slo));
        }
        self.slo = slo;
        self.admission.configure(max_delay, !reject_late);
    }

    pub fn set_admission(&mut self, admission: AdmissionPolicy) {
        self.admission.set_policy(admission);
    }

    pub fn refuses_late(&self) -> bool {
        self.admission.refuses_late()
    }

    pub fn slo(&self) -> Duration {
        self.slo
    }

    /// If need be, the request takes the place of settled ones.
    pub fn accept(
        &mut self,
        request: QueuedRequest<K, T>,
        now: Timestamp,
    ) -> Result<(), RefusedRequest<K, T>> {
        self.update_outage(now);
        self.observer.record_arrival(request.rows);
        let lane = self.serving().map(|lane| &self.lanes[lane]);
        let before = || self.queues.rows_before(request.level);
        let refused = if self.admission.refuses(&request, before, lane, now) {
            RefusedRequest { request, why: RefusalReason::TooLate }
        } else {
            let pushed = self.queues.push(request).or_else(|request| {
                self.forget_settled();
                self.queues.push(request)
            });
            let Err(request) = pushed else { return Ok(()) };
            RefusedRequest { request, why: RefusalReason::QueueFull }
        };
        self.observer.record_refusal();
        Err(refused)
    }

    pub fn record_refused_arrival(&mut self, rows: u32) {
        self.observer.record_arrival(rows);
        self.observer.record_refusal();
    }

    /// An accepted request missed its SLO without an answer.
    pub fn record_miss(&mut self) {
        self.observer.record_refusal();
    }

    /// Counts an answer that its client has, `latency` after the request began to arrive.
    pub fn record_answer(&mut self, latency: Duration) {
        self.observer.record_answer(latency, self.slo);
    }

    /// Learns how long an answer took from its worker to its client's socket. Predictions add the mean.
    pub fn record_write_time(&mut self, took: Duration) {
        self.admission.record_write_time(took, self.slo);
    }

    /// Requests go before steps of open streams, but one at a time: those that end with their first
    /// answer would hold the streams up.
    pub fn next(&mut self, now: Timestamp) -> NextAction<K, T> {
        self.update_outage(now);
        if self.step_is_next
            && let Some(step) = self.next_step()
        {
            self.step_is_next = false;
            return NextAction::Act(Vec::new(), Some(step));
        }
        let next = match self.serving() {
            Some(lane) => self.next_on(lane, now),
            None if self.queues.is_empty() => NextAction::Wait(SchedulerWait::Idle),
            None => NextAction::Wait(SchedulerWait::NoLane),
        };
        let NextAction::Wait(_) = next else {
            self.step_is_next = true;
            return next;
        };
        match self.next_step() {
            Some(step) => NextAction::Act(Vec::new(), Some(step)),
            None => {
                self.update_queue_state(now);
                next
            }
        }
    }

    fn next_step(&mut self) -> Option<OutgoingBatch<K, T>> {
        let lanes = self.lanes.iter_mut().enumerate();
        let found = lanes.filter_map(|(index, lane)| Some((index, lane.next_step()?))).next();
        let (index, (slot, step)) = found?;
        Some(self.sending(index, slot, vec![step]))
    }

    fn next_on(&mut self, index: usize, now: Timestamp) -> NextAction<K, T> {
        let limits = self.lanes[index].limits(self.admission.limits());
        loop {
            let lane = &self.lanes[index];
            let wanted = !self.queues.is_empty() && lane.has_room(self.streams) && !lane.tries_suspect();
            let Some(slot) = lane.next_slot().filter(|_| wanted) else {
                return NextAction::Wait(SchedulerWait::Idle);
            };
            if let Some(until) = self.admission.hold_until(lane, now) {
                return NextAction::Wait(SchedulerWait::Until(until));
            }
            let deadline_filter = self.admission.deadline_filter(lane, now);
            let FormedBatch { mut batch, late } =
                match self.queues.next(&limits, deadline_filter.as_ref(), now) {
                    batcher::NextBatch::Run(taken) => taken,
                    batcher::NextBatch::WaitUntil(until) => {
                        return NextAction::Wait(SchedulerWait::Until(until));
                    }
                    batcher::NextBatch::Idle => return NextAction::Wait(SchedulerWait::Idle),
                };
            let late = late.into_iter().filter(|request| !request.item.is_settled());
            let mut refused: Vec<_> =
                late.map(|request| RefusedRequest { request, why: RefusalReason::TooLate }).collect();
            self.remove_unservable(&mut batch, &mut refused, now);
            refused.iter().for_each(|_| self.observer.record_refusal());
            if batch.is_empty() && refused.is_empty() {
                continue;
            }
            self.queues.put_back(self.lanes[index].split_off_rest(&mut batch));
            return NextAction::Act(refused, (!batch.is_empty()).then(|| self.sending(index, slot, batch)));
        }
    }

    fn sending(&mut self, index: usize, slot: u8, requests: Vec<QueuedRequest<K, T>>) -> OutgoingBatch<K, T> {
        self.next_batch += 1;
        let Lane { worker, groups, .. } = self.lanes[index];
        OutgoingBatch { worker, id: self.next_batch, slot, groups, requests }
    }

    /// Settled requests, and those that overload has made too late.
    fn remove_unservable(
        &self,
        batch: &mut Vec<QueuedRequest<K, T>>,
        refused: &mut Vec<RefusedRequest<K, T>>,
        now: Timestamp,
    ) {
        batch.retain(|request| !request.item.is_settled());
        let Some(overload) = self.overload.as_ref().filter(|_| !self.admission.refuses_late()) else {
            return;
        };
        let overdue = batch.extract_if(.., |request| overload.refuses(request.deadline, now));
        refused.extend(overdue.map(|request| RefusedRequest { request, why: RefusalReason::Overdue }));
    }

    /// Returns whether the batch executes at once, because nothing was before it.
    pub fn confirm_sent(&mut self, sending: OutgoingBatch<K, T>, now: Timestamp) -> bool {
        let OutgoingBatch { worker, id, slot, groups, requests } = sending;
        let Some(index) = self.lanes.iter().position(|lane| lane.worker == worker) else {
            self.queues.put_back(requests);
            return false;
        };
        let lane = &mut self.lanes[index];
        lane.take_slot(slot);
        let executes = lane.in_flight.is_empty();
        let rows = requests.iter().map(|request| request.rows).sum();
        let executing_since = executes.then_some(now);
        let step = requests.first().is_some_and(|first| first.item.is_step());
        let sent = BatchInFlight { id, slot, rows, step, groups, sent: now, executing_since, requests };
        lane.in_flight.push_back(sent);
        executes
    }

    /// The lane did not take the batch: its requests wait at the head of the queue.
    pub fn return_unsent(
        &mut self,
        OutgoingBatch { worker, mut requests, .. }: OutgoingBatch<K, T>,
        now: Timestamp,
    ) {
        let steps: Vec<_> = requests.extract_if(.., |request| request.item.is_step()).collect();
        if let Some(lane) = self.lane_mut(worker) {
            steps.into_iter().for_each(|step| lane.streams.steps.push_front(step));
        }
        self.queues.put_back(requests);
        self.update_queue_state(now);
    }

    /// A stream has begun, whose first answer is there.
    pub fn open_stream(&mut self, worker: WorkerId) {
        if let Some(lane) = self.lane_mut(worker) {
            lane.streams.open += 1;
        }
    }

    /// The next answer of a stream is wanted; back if its worker cannot give it any more.
    pub fn queue_step(
        &mut self,
        worker: WorkerId,
        step: QueuedRequest<K, T>,
    ) -> Result<(), QueuedRequest<K, T>> {
        match self.lane_mut(worker).filter(|lane| !lane.streams.cut) {
            Some(lane) => {
                lane.streams.steps.push_back(step);
                Ok(())
            }
            None => Err(step),
        }
    }

    /// A stream has ended. Returns whether a draining lane is now empty.
    pub fn close_stream(&mut self, worker: WorkerId) -> bool {
        let Some(lane) = self.lane_mut(worker) else { return false };
        lane.streams.open = lane.streams.open.saturating_sub(1);
        lane.ends_draining()
    }

    /// A worker has answered. The batch's slot stays taken. `None` if the worker had no such batch.
    pub fn take_batch(
        &mut self,
        worker: WorkerId,
        batch: u64,
        now: Timestamp,
    ) -> Option<BatchInFlight<K, T>> {
        let taken = self.lane_mut(worker)?.take_batch(batch, now);
        self.update_busy(now);
        taken
    }

    pub fn record_completion(
        &mut self,
        worker: WorkerId,
        batch: &BatchInFlight<K, T>,
        execution: Duration,
    ) -> CompletedBatch {
        let Some(lane) = self.lane_mut(worker) else {
            return CompletedBatch { observed: false, first: false };
        };
        // On another partition it says nothing of the SMs on which the lane is now.
        let here = batch.groups == lane.groups;
        // Of a stream, times of first answers are learnt: the SLO is about these.
        let observed = here && !batch.step;
        if observed {
            lane.predictor.observe(batch.rows, execution);
        }
        let first = here && !std::mem::replace(&mut lane.answered, true);
        if observed && lane.duty == Duty::Serving {
            self.observer.record_batch(batch.rows, execution);
        }
        CompletedBatch { observed, first }
    }

    /// The answer in `slot` is done with. Returns whether a draining lane is now empty.
    pub fn recycle(&mut self, worker: WorkerId, slot: u8) -> bool {
        let Some(lane) = self.lane_mut(worker) else { return false };
        lane.recycle(slot);
        lane.ends_draining()
    }

    pub fn attach(&mut self, lane: Lane<K, T>) {
        self.lanes.push(lane);
    }

    /// What the worker had must have been [taken back](Self::take_back).
    pub fn detach(&mut self, worker: WorkerId) {
        self.lanes.retain(|lane| lane.worker != worker);
    }

    /// The lane that batches went to before finishes what it has.
    pub fn route(&mut self, worker: Option<WorkerId>) {
        for lane in &mut self.lanes {
            if Some(lane.worker) == worker {
                if lane.duty != Duty::Serving {
                    self.observer.forget_batches();
                    lane.answered = false;
                }
                lane.duty = Duty::Serving;
            } else if lane.duty == Duty::Serving {
                lane.duty = Duty::Idle;
            }
        }
    }

    pub fn move_to(&mut self, worker: WorkerId, slice: &Slice) {
        let Some(lane) = self.lane_mut(worker) else { return };
        lane.move_to(slice);
        if lane.duty == Duty::Serving {
            self.observer.forget_batches();
        }
    }

    /// Nothing more goes to `worker`, and [`Scheduler::recycle`] says when it has nothing left.
    /// Returns whether that is so already.
    pub fn drain(&mut self, worker: WorkerId) -> bool {
        let Some(lane) = self.lane_mut(worker) else { return false };
        lane.duty = if lane.is_empty() { Duty::Idle } else { Duty::Draining };
        lane.is_empty()
    }

    /// Returns whether batches went to `worker`.
    pub fn stop_sending(&mut self, worker: WorkerId) -> bool {
        let before = self.lane_mut(worker).map(|lane| std::mem::replace(&mut lane.duty, Duty::Idle));
        before == Some(Duty::Serving)
    }

    /// The worker's batches stay, and its answers to them are ignored.
    pub fn take_back(&mut self, worker: WorkerId) -> AbandonedRequests<K, T> {
        let none = AbandonedRequests { executing: Vec::new(), behind: Vec::new() };
        self.lane_mut(worker).map_or(none, Lane::abandon)
    }

    /// For requests that ran without an answer: at the head of the queue.
    pub fn put_back(&mut self, requests: Vec<QueuedRequest<K, T>>, now: Timestamp) {
        if !requests.is_empty() {
            self.admission.put_back(now);
        }
        self.given_up += requests.iter().filter(|request| request.item.is_settled()).count();
        self.queues.put_back(requests);
    }

    /// Until the queue has been empty once, late requests are no sign of load.
    pub fn record_disturbance(&mut self) {
        if let Some(overload) = &mut self.overload {
            overload.on_disturbance();
        }
    }

    /// `None`: the batch was reported to hang, so that the report comes once.
    pub fn set_executing_since(&mut self, worker: WorkerId, since: Option<Timestamp>) {
        if let Some(front) = self.lane_mut(worker).and_then(|lane| lane.in_flight.front_mut()) {
            front.executing_since = since;
        }
    }

    /// Of a request without an answer. It must not keep others out for long.
    pub fn give_up(&mut self) {
        self.given_up += 1;
        if self.given_up * GIVEN_UP_ONE_IN >= self.queues.len() {
            self.forget_settled();
        }
    }

    pub fn forget_settled(&mut self) {
        // Only then is looking through the whole queue worth it.
        if self.given_up == 0 {
            return;
        }
        self.given_up = 0;
        self.queues.take_if(|request| request.item.is_settled());
    }

    /// Waiting requests. Looks at every one.
    pub fn take_if(&mut self, mut gone: impl FnMut(&T) -> bool) -> Vec<QueuedRequest<K, T>> {
        self.queues.take_if(|request| gone(&request.item))
    }

    /// Takes the waiting requests whose deadline is past out of the queue, if the rules refuse late
    /// requests.
    pub fn take_overdue(&mut self, now: Timestamp) -> Vec<RefusedRequest<K, T>> {
        if self.overload.is_none() {
            return Vec::new();
        }
        let overdue = self.queues.take_if(|request| request.deadline < now);
        let refused = overdue.into_iter().filter(|request| !request.item.is_settled());
        let refused: Vec<_> =
            refused.map(|request| RefusedRequest { request, why: RefusalReason::Overdue }).collect();
        refused.iter().for_each(|_| self.observer.record_refusal());
        refused
    }

    pub fn drain_queue(&mut self) -> Vec<QueuedRequest<K, T>> {
        self.queues.drain_all()
    }

    pub fn queued(&self) -> usize {
        self.queues.len()
    }

    /// Requests, not batches.
    pub fn in_flight(&self) -> usize {
        let batches = self.lanes.iter().flat_map(|lane| &lane.in_flight);
        batches.map(|batch| batch.requests.len()).sum()
    }

    pub fn observe(&mut self, now: Timestamp) -> Observation {
        self.observer.take(self.queues.len(), now)
    }

    pub fn lane(&self, worker: WorkerId) -> Option<&Lane<K, T>> {
        self.lanes.iter().find(|lane| lane.worker == worker)
    }

    pub fn serving_lane(&self) -> Option<&Lane<K, T>> {
        self.serving().map(|lane| &self.lanes[lane])
    }

    fn lane_mut(&mut self, worker: WorkerId) -> Option<&mut Lane<K, T>> {
        self.lanes.iter_mut().find(|lane| lane.worker == worker)
    }

    fn serving(&self) -> Option<usize> {
        self.lanes.iter().position(|lane| lane.duty == Duty::Serving)
    }

    fn update_outage(&mut self, now: Timestamp) {
        let serves = self.serving_lane().is_some_and(|lane| !lane.is_stalled(now));
        self.admission.update_outage(serves, now);
    }

    fn update_queue_state(&mut self, now: Timestamp) {
        let serves = self.serving_lane().is_some();
        if let Some(overload) = &mut self.overload {
            if !self.queues.is_empty() {
                overload.on_queued(now);
            } else if serves {
                // In an outage no lane has emptied it: those that come must wait all the same.
                overload.on_emptied();
            }
        }
        if self.queues.is_empty() {
            self.admission.on_queue_emptied(now);
        }
        self.update_busy(now);
    }

    fn update_busy(&mut self, now: Timestamp) {
        let executes = self.serving_lane().is_some_and(|lane| !lane.is_idle());
        self.observer.set_busy(executes, now);
    }
}
