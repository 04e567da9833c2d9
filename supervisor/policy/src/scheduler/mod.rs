//! The scheduler of one model. It queues and refuses requests, forms batches, and decides when each
//! batch goes to which lane.
//!
//! ```text
//! accept ─▶ admission ─▶ queues ─▶ next ─▶ confirm_sent ─▶ lane ─▶ take_batch, recycle
//!                          ▲                                │
//!                          └───── put_back ◀─ take_back ◀───┘
//! ```
//!
//! The caller of the scheduler is called its driver. The driver reports events with their time, and
//! applies the scheduler's decisions. The supervisor's driver uses sockets and slabs, and the
//! simulator's driver uses a virtual clock. After each event that may release a batch, the driver calls
//! [`Scheduler::next`] until it returns [`NextAction::Wait`].

mod admission;
pub mod batcher;
mod deadline;
mod lane;
mod lanes;
mod messages;
mod overdue;
mod overload;
pub mod queue;
mod queues;
mod streams;
mod tenant_queues;
mod tenants;
#[cfg(test)]
mod tests;
mod traffic;
mod write_time;

use std::time::Duration;

use shadowslice_shared::batch::StreamLimits;
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::Timestamp;

use crate::sharing::{AdmissionPolicy, Observation};
use crate::tenants::TenantTurns;

pub use lane::{AbandonedRequests, BatchInFlight, Lane, LaneWeights, Slice};
pub use lanes::ExecutingBatch;
pub use messages::{
    CompletedBatch, NextAction, OutgoingBatch, RefusalReason, RefusedRequest, SchedulerWait, SchedulingRules,
    Ticket,
};
pub use queue::{QueuedRequest, SUSPECT_LEVEL};
pub use traffic::{
    Latencies, RecentLatencies, TrafficCounts, TrafficRecorder, TrafficWindow, Unanswered, is_in_time,
};

use admission::AdmissionControl;
use batcher::{BatchLimits, FormedBatch};
use lane::Duty;
use overload::OverloadDetector;
use queues::PriorityQueues;
use tenant_queues::BatchTerms;

/// The divisor of the queue length that gives the limit for abandoned requests. When their number
/// reaches the limit, the scheduler removes them from the queue. A removal inspects the whole queue,
/// which has about this number of requests for each abandoned request.
const GIVEN_UP_ONE_IN: usize = 8;

/// The queues, lanes and admission of one model. `K` is the type of a request's shape, and `T` is its
/// [`Ticket`].
#[derive(Debug)]
pub struct Scheduler<K, T> {
    slo: Duration,
    admission: AdmissionControl,
    queues: PriorityQueues<K, T>,
    /// The number of requests that clients abandoned since the last removal. Some of them may be
    /// executing and are then not in the queue.
    given_up: usize,
    lanes: Vec<Lane<K, T>>,
    /// The overload detector, or `None` for a model that serves late requests.
    overload: Option<OverloadDetector>,
    traffic: TrafficRecorder,
    next_batch: u64,
    /// The SLO of each further answer of a stream, or `None` if it has none.
    next_slo: Option<Duration>,
    /// The recorder of the times between the answers of streams.
    gaps: TrafficRecorder,
    /// The limits on streams, or `None` for a model that gives one answer per request.
    streams: Option<StreamLimits>,
    /// True if the next step of a stream has precedence over new requests, because the last batch
    /// contained new requests.
    step_is_next: bool,
    /// The turns of the tenants.
    turns: TenantTurns,
}

impl<K: Ord + Clone, T: Ticket> Scheduler<K, T> {
    /// Creates a scheduler without lanes. Its queue holds at most `max_requests` requests.
    pub fn new(rules: SchedulingRules, max_requests: usize, now: Timestamp) -> Self {
        let SchedulingRules { slo, next_slo, max_delay, reject_late } = rules;
        let limits = BatchLimits { max_rows: 0, max_requests: 1, max_delay };
        Self {
            slo,
            admission: AdmissionControl::new(limits, !reject_late),
            queues: PriorityQueues::new(max_requests),
            given_up: 0,
            lanes: Vec::new(),
            overload: reject_late.then(|| OverloadDetector::new(slo)),
            traffic: TrafficRecorder::new(now),
            next_slo,
            gaps: TrafficRecorder::new(now),
            next_batch: 0,
            streams: None,
            step_is_next: false,
            turns: TenantTurns::default(),
        }
    }

    /// Sets the limits of the model: the maximum rows and requests of a batch, and the limits on the
    /// streams of a lane. `max_rows` is 0 if the model has no batch axis. `streams` is `None` if the
    /// model gives one answer per request.
    pub fn set_model_limits(&mut self, max_rows: u32, max_requests: usize, streams: Option<StreamLimits>) {
        self.admission.set_model_limits(max_rows, max_requests);
        self.streams = streams;
        self.lanes.iter_mut().for_each(|lane| lane.streams.limits = streams);
    }

    /// Replaces the configured rules. Requests in the queue keep their deadlines.
    pub fn set_rules(&mut self, rules: SchedulingRules) {
        let SchedulingRules { slo, next_slo, max_delay, reject_late } = rules;
        if self.slo != slo || self.overload.is_some() != reject_late {
            self.overload = reject_late.then(|| OverloadDetector::new(slo));
        }
        (self.slo, self.next_slo) = (slo, next_slo);
        self.admission.configure(max_delay, !reject_late);
    }

    /// Sets the admission limits that the sharing policy decided.
    pub fn set_admission(&mut self, admission: AdmissionPolicy) {
        self.admission.set_policy(admission);
    }

    /// Returns true if the model refuses requests that cannot be answered in time.
    pub fn refuses_late(&self) -> bool {
        self.admission.refuses_late()
    }

    /// Returns the model's SLO.
    pub fn slo(&self) -> Duration {
        self.slo
    }

    /// Queues a request. If the request is refused, returns the request with the reason. If the queue
    /// is full, first removes settled requests from it. If it is still full, the request may take the place
    /// of a request of another tenant, which is then returned.
    pub fn accept(
        &mut self,
        request: QueuedRequest<K, T>,
        now: Timestamp,
    ) -> Result<Option<RefusedRequest<K, T>>, RefusedRequest<K, T>> {
        self.update_outage(now);
        self.traffic.record_arrival(request.rows);
        // If all streams are in use, the end of one cannot be predicted, and the request waits.
        let lane = self.serving().map(|lane| &self.lanes[lane]).filter(|lane| lane.has_room());
        let before = || self.queues.rows_before(request.level, request.tenant, &self.turns);
        if let Some(why) = self.admission.refusal(&request, before, lane, now) {
            return Err(RefusedRequest { request, why });
        }
        let pushed = self.queues.push(request).or_else(|request| {
            self.forget_settled();
            self.queues.push(request)
        });
        let Err(request) = pushed else { return Ok(None) };
        // Requests that were put back may exceed the limit. Then one displaced request would make no room.
        let is_over = self.queues.is_over_limit();
        let displaced =
            if is_over { None } else { self.displace(request.tenant, RefusalReason::QueueFull, |_| true) };
        match self.queues.push(request) {
            Ok(()) => Ok(displaced),
            Err(request) => Err(RefusedRequest { request, why: RefusalReason::QueueFull }),
        }
    }

    /// Records a request of `rows` rows that the driver refused or answered before it reached the scheduler.
    pub fn record_arrival(&mut self, rows: u32) {
        self.traffic.record_arrival(rows);
    }

    /// Records the end of a request without an answer. The driver also reports the requests that the
    /// scheduler refuses, because a client may abandon such a request at the same time.
    pub fn record_unanswered(&mut self, how: Unanswered, now: Timestamp) {
        self.traffic.record_unanswered(how, self.slo, now);
    }

    /// Records an answer that the client has received. `latency` is the time since the first byte of
    /// the request arrived.
    pub fn record_answer(&mut self, latency: Duration, now: Timestamp) {
        self.traffic.record_answer(latency, self.slo, now);
    }

    /// Records the time that an answer took from its worker to the client's socket. Predictions include
    /// the mean of these times.
    pub fn record_write_time(&mut self, took: Duration) {
        self.admission.record_write_time(took, self.slo);
    }

    /// Returns the driver's next action. New requests have precedence over steps of open streams, but
    /// only for one batch at a time, or for as many as the SLO of the next answers permits. Otherwise a
    /// steady flow of new requests would block the streams.
    pub fn next(&mut self, now: Timestamp) -> NextAction<K, T> {
        self.update_outage(now);
        let starts = self.serving_lane().is_some_and(|lane| lane.has_time_to_start(self.next_slo));
        if self.step_is_next
            && !starts
            && let Some(step) = self.next_step()
        {
            self.step_is_next = false;
            return NextAction::Act(Vec::new(), Some(step));
        }
        let next = match self.serving() {
            Some(lane) if self.lanes[lane].sleeps() && !self.queues.is_empty() => {
                NextAction::Wait(SchedulerWait::Asleep)
            }
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
        Some(self.sending(index, slot, step))
    }

    fn next_on(&mut self, index: usize, now: Timestamp) -> NextAction<K, T> {
        let limits = self.lanes[index].limits(self.admission.limits());
        loop {
            let lane = &self.lanes[index];
            if !self.queues.is_empty() && !lane.has_room() {
                return self.wait_for_room(now);
            }
            let wanted = !self.queues.is_empty() && !lane.tries_suspect();
            let Some(slot) = lane.next_slot().filter(|_| wanted) else {
                return NextAction::Wait(SchedulerWait::Idle);
            };
            if let Some(until) = self.admission.hold_until(lane, now) {
                return NextAction::Wait(SchedulerWait::Until(until));
            }
            let deadline_filter = self.admission.deadline_filter(lane, now);
            let turns = &lane.turns_after(&self.turns);
            let (deadline_filter, row_cost) = (deadline_filter.as_ref(), lane.row_cost(limits.max_rows));
            let terms = BatchTerms { limits: &limits, deadline_filter, turns, row_cost, now };
            let FormedBatch { mut batch, late } = match self.queues.next(&terms) {
                batcher::NextBatch::Run(taken) => taken,
                batcher::NextBatch::WaitUntil(until) => {
                    return NextAction::Wait(SchedulerWait::Until(until));
                }
                batcher::NextBatch::Idle => return NextAction::Wait(SchedulerWait::Idle),
            };
            let late = late.into_iter().filter(|request| !request.item.is_settled());
            let mut refused: Vec<_> =
                late.map(|request| RefusedRequest { request, why: RefusalReason::TooLate }).collect();
            self.remove_unservable(&self.lanes[index], &mut batch, &mut refused, now);
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

    /// Removes settled requests from a batch, and refuses those whose clients will not wait for its end.
    /// Under overload, also refuses the requests of the batch that are too late.
    fn remove_unservable(
        &self,
        lane: &Lane<K, T>,
        batch: &mut Vec<QueuedRequest<K, T>>,
        refused: &mut Vec<RefusedRequest<K, T>>,
        now: Timestamp,
    ) {
        batch.retain(|request| !request.item.is_settled());
        let expired = batch.extract_if(.., |request| self.admission.expires_first(request, lane, now));
        refused.extend(expired.map(|request| RefusedRequest { request, why: RefusalReason::Expires }));
        let Some(overload) = self.overload.as_ref().filter(|_| !self.admission.refuses_late()) else {
            return;
        };
        let overdue = batch.extract_if(.., |request| overload.refuses(request.deadline, now));
        refused.extend(overdue.map(|request| RefusedRequest { request, why: RefusalReason::Overdue }));
    }

    /// Records that the driver sent a batch. Returns true if the batch executes immediately, because
    /// the lane was idle.
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
        lane.streams.record_sent(slot, step);
        let sent = BatchInFlight { id, slot, rows, step, groups, sent: now, executing_since, requests };
        lane.in_flight.push_back(sent);
        executes
    }

    /// Records that the driver could not send the batch. Its requests return to the head of the queue.
    pub fn return_unsent(
        &mut self,
        OutgoingBatch { worker, mut requests, .. }: OutgoingBatch<K, T>,
        now: Timestamp,
    ) {
        let steps: Vec<_> = requests.extract_if(.., |request| request.item.is_step()).collect();
        if let Some(lane) = self.lane_mut(worker) {
            steps.into_iter().rev().for_each(|step| lane.streams.steps.push_front(step));
        }
        self.queues.put_back(requests);
        self.update_queue_state(now);
    }

    /// Removes a batch from a lane, because its worker answered. The batch's slot stays occupied.
    /// Returns `None` if the lane has no batch with this id.
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

    /// Updates predictions with the execution time of a batch that [`take_batch`](Self::take_batch)
    /// returned.
    pub fn record_completion(
        &mut self,
        worker: WorkerId,
        batch: &BatchInFlight<K, T>,
        execution: Duration,
    ) -> CompletedBatch {
        let Some(lane) = self.lane_mut(worker) else {
            return CompletedBatch { observed: false, first: false };
        };
        // A time on other groups does not predict times on the SMs that the lane uses now.
        let here = batch.groups == lane.groups;
        let together = lane.streams.advance_together();
        // Steps of streams that take turns are not observed, because a generator may pause between two
        // answers.
        let observed = here && (together || !batch.step);
        match (observed, together && !batch.step) {
            (true, true) => lane.streams.observe_start(execution),
            (true, false) => lane.predictor.observe(batch.rows, execution),
            (false, _) => {}
        }
        let first = here && !std::mem::replace(&mut lane.answered, true);
        if observed && lane.duty == Duty::Serving {
            self.traffic.record_batch(batch.rows, execution);
        }
        CompletedBatch { observed: observed && !together, first }
    }

    /// Frees `slot` after the driver has copied its answer. Returns true if a draining lane is now
    /// empty.
    pub fn recycle(&mut self, worker: WorkerId, slot: u8) -> bool {
        let Some(lane) = self.lane_mut(worker) else { return false };
        lane.recycle(slot);
        lane.ends_draining()
    }

    /// Puts requests that were sent but not answered back at the head of the queue.
    pub fn put_back(&mut self, requests: Vec<QueuedRequest<K, T>>, now: Timestamp) {
        if !requests.is_empty() {
            self.admission.put_back(now);
        }
        self.given_up += requests.iter().filter(|request| request.item.is_settled()).count();
        self.queues.put_back(requests);
    }

    /// Records an outage. Until the queue is empty, late requests do not count as overload.
    pub fn record_disturbance(&mut self) {
        if let Some(overload) = &mut self.overload {
            overload.on_disturbance();
        }
    }

    /// Sets the time at which the first batch of a lane started to execute. The driver sets `None`
    /// after it has reported the batch as hung, so that it reports each hung batch only once.
    pub fn set_executing_since(&mut self, worker: WorkerId, since: Option<Timestamp>) {
        if let Some(front) = self.lane_mut(worker).and_then(|lane| lane.in_flight.front_mut()) {
            front.executing_since = since;
        }
    }

    /// Records that a client abandoned a request that has no answer. The scheduler soon removes the
    /// request from the queue, to make room for others.
    pub fn give_up(&mut self) {
        self.given_up += 1;
        if self.given_up * GIVEN_UP_ONE_IN >= self.queues.len() {
            self.forget_settled();
        }
    }

    /// Removes settled requests from the queue.
    pub fn forget_settled(&mut self) {
        // If no request was abandoned, a scan of the whole queue would find nothing.
        if self.given_up == 0 {
            return;
        }
        self.given_up = 0;
        self.queues.take_if(|request| request.item.is_settled());
    }

    /// Removes and returns the queued requests that `gone` selects. Inspects every queued request.
    pub fn take_if(&mut self, mut gone: impl FnMut(&T) -> bool) -> Vec<QueuedRequest<K, T>> {
        self.queues.take_if(|request| gone(&request.item))
    }

    /// Removes and returns all queued requests.
    pub fn drain_queue(&mut self) -> Vec<QueuedRequest<K, T>> {
        self.queues.drain_all()
    }

    /// Returns the number of queued requests.
    pub fn queued(&self) -> usize {
        self.queues.len()
    }

    /// Returns the number of requests in batches on the lanes.
    pub fn in_flight(&self) -> usize {
        let batches = self.lanes.iter().flat_map(|lane| &lane.in_flight);
        batches.map(|batch| batch.requests.len()).sum()
    }

    /// Returns the observations since the last call.
    pub fn observe(&mut self, now: Timestamp) -> Observation {
        let first = self.traffic.observe(self.queues.len(), now);
        let next = self.gaps.observe(0, now);
        if self.next_slo.is_some() { first.with_gaps(&next) } else { first }
    }

    /// Returns the recorder of the model's requests.
    pub fn traffic(&mut self) -> &mut TrafficRecorder {
        &mut self.traffic
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
                // During an outage, an empty queue is not recorded, because new requests must wait in
                // any case.
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
        self.traffic.set_busy(executes, now);
    }
}
