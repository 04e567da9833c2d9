//! The state of a pipeline, protected by one lock: the queue, the lanes, and the lane that serves.
//!
//! All functions in this module are short and never block. If a slot is free, the client's task
//! sends the request to the worker before the task releases the lock. No other task needs to wake
//! up for this.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use shadowslice_policy::blame;
use shadowslice_policy::scheduler::{
    self, AbandonedRequests, NextAction, SUSPECT_LEVEL, SchedulerWait, Unanswered,
};
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::Timestamp;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, watch};

use super::figures::{CountedRefusal, StallMeter, Stats};
use super::gate::Gate;
use super::requests::{
    InFlightBatch, PendingRequest, ReplyTarget, RequestFailure, Reservation, Shapes, WaitingRequest,
    WorkerAnswer, broken_off, died_in_step,
};
use super::sleep::{Absence, ResidencySignal, SleepPhase};
use super::trace_event;
use super::workers::{
    Admission, LaneEvent, PipelineBatch, PipelineLane, PipelineScheduler, Quarantine, WorkerLink,
};
use crate::trace::{LostReason, RouteChange};

/// The largest number of ended workers that are remembered. Several workers of a model may end
/// together, but a model always has fewer workers than this number.
const MAX_IDLE_ENDED: usize = 8;

/// The delay after which a batch is sent again to an idle worker whose socket did not accept it.
/// Normally an answer triggers the next attempt, but an idle worker has no pending answer. After
/// the delay, memory for the message may be free. If the worker has ended, the lane's reader
/// notices this before the delay is over.
const RESEND_DELAY: Duration = Duration::from_millis(5);

/// The delay after its deadline at which a request is refused, if its model still sleeps.
const OVERDUE_DELAY: Duration = Duration::from_millis(1);

pub(crate) type SchedulerRefusal = scheduler::RefusedRequest<Shapes, PendingRequest>;

#[derive(Debug)]
pub(crate) struct PipelineState {
    pub(crate) name: Arc<str>,
    pub(crate) gate: Gate,
    pub(crate) scheduler: PipelineScheduler,
    /// The links. There is one link for each lane of the scheduler.
    pub(crate) links: Vec<WorkerLink>,
    pub(crate) stall: StallMeter,
    pub(crate) stats: Stats,
    /// The percentage of requests that must be answered within the SLO's latency.
    pub(crate) percentile: f64,
    /// The model's priority; 1 is the highest.
    pub(crate) priority: u32,
    pub(crate) events_tx: mpsc::Sender<LaneEvent>,
    /// The time of the next check, unless an event causes an earlier check.
    pub(crate) alarm: Option<Timestamp>,
    /// The time for which the alarm is set. It may be earlier than `alarm`.
    pub(crate) armed: Option<Timestamp>,
    /// The most recent route change.
    pub(crate) routed: Option<RouteChange>,
    /// The most recently ended workers that were idle when they ended.
    pub(crate) idle_ended: VecDeque<WorkerId>,
    pub(crate) quarantine: Quarantine,
    /// The signals to the task that decides which models sleep.
    pub(crate) residency: Arc<ResidencySignal>,
    /// True if the weights of a model that sleeps may stay in pinned host memory.
    pub(crate) pins: bool,
    /// The time of the last accepted request.
    pub(crate) used: Timestamp,
    /// True if an operator has ordered the model to wake.
    pub(crate) is_wake_ordered: bool,
    pub(crate) sleep_tx: watch::Sender<SleepPhase>,
    /// The sleep without a worker, if the model sleeps so.
    pub(crate) absence: Option<Absence>,
    /// The time of the last start of a worker after such a sleep.
    pub(crate) start_time: Option<Duration>,
}

impl PipelineState {
    pub(crate) fn accept(
        &mut self,
        mut request: WaitingRequest,
        now: Timestamp,
    ) -> Result<(), RequestFailure> {
        if self.gate.open().is_err() {
            let failure = self.not_ready();
            self.count_refusal(CountedRefusal::NotReady, request.rows, now);
            trace_event::record_refusal(request.item.journal.as_ref(), CountedRefusal::NotReady);
            return Err(failure);
        }
        match self.quarantine.admit(&request.item.memory, now) {
            Admission::Free => {}
            Admission::OnTrial => (request.alone, request.item.deaths) = (true, blame::ON_TRIAL),
            Admission::Refused(pause) => {
                self.count_refusal(CountedRefusal::Quarantined, request.rows, now);
                trace_event::record_refusal(request.item.journal.as_ref(), CountedRefusal::Quarantined);
                return Err(quarantined(pause));
            }
        }
        let journal = request.item.journal.clone();
        match self.scheduler.accept(request, now) {
            Ok(displaced) => displaced.into_iter().for_each(|displaced| self.reject(displaced, now)),
            Err(refused) => {
                let (why, failure) = self.refusal(&refused, now);
                trace_event::record_refusal(journal.as_ref(), why);
                self.record_refusal(why, Duration::ZERO, now);
                return Err(failure);
            }
        }
        if let Some(journal) = journal {
            journal.record_queued(now);
        }
        self.stats.accepted += 1;
        self.used = now;
        self.dispatch(now);
        Ok(())
    }

    pub(crate) fn count_refusal(&mut self, why: CountedRefusal, rows: u32, now: Timestamp) {
        // The scheduler only needs arrivals that were refused because of the model's load.
        if why == CountedRefusal::MemoryFull {
            self.scheduler.record_arrival(rows);
        }
        self.record_refusal(why, Duration::ZERO, now);
    }

    /// Records a refused request. `waited` is the time since its arrival.
    pub(crate) fn record_refusal(&mut self, why: CountedRefusal, waited: Duration, now: Timestamp) {
        self.stats.add_refusal(why);
        match why.unanswered() {
            Some(how) => self.record_unanswered(how, waited, now),
            None => self.stats.totals.fail.add(waited),
        }
    }

    /// Records the end of a request without an answer. `waited` is the time since its arrival.
    pub(crate) fn record_unanswered(&mut self, how: Unanswered, waited: Duration, now: Timestamp) {
        self.stats.totals.fail.add(waited);
        self.scheduler.record_unanswered(how, now);
    }

    /// Sends all batches that can be sent, and sets `alarm` to the time of the next check.
    pub(crate) fn dispatch(&mut self, now: Timestamp) {
        self.continue_sleep();
        self.update_turns(now);
        let rest = self.send_all(now);
        self.stall.update(matches!(rest, None | Some(SchedulerWait::NoLane)), now);
        let wait = match rest {
            Some(SchedulerWait::Until(wait)) => Some(wait),
            Some(SchedulerWait::Idle) => None,
            Some(SchedulerWait::NoLane | SchedulerWait::Asleep) => {
                self.announce_waiting();
                self.overdue_at()
            }
            None => Some(now + RESEND_DELAY),
        };
        self.alarm = [wait, self.next_check(now)].into_iter().flatten().min();
        self.report_tenants();
        self.announce_idle();
    }

    /// Returns the time at which the first request that waits for a model that sleeps is refused.
    fn overdue_at(&self) -> Option<Timestamp> {
        let refuses = self.scheduler.refuses_overdue() && self.refuses_asleep();
        let deadline = self.scheduler.earliest_deadline().filter(|_| refuses);
        deadline.map(|deadline| deadline + OVERDUE_DELAY)
    }

    /// Sends batches until the scheduler has no more to send, and returns the reason. Returns
    /// `None` if a batch was ready but the worker's socket did not accept it.
    fn send_all(&mut self, now: Timestamp) -> Option<SchedulerWait> {
        loop {
            match self.scheduler.next(now) {
                NextAction::Wait(rest) => return Some(rest),
                NextAction::Act(refused, sending) => {
                    refused.into_iter().for_each(|refused| self.reject(refused, now));
                    if sending.is_some_and(|sending| !self.send(sending, now)) {
                        return None;
                    }
                }
            }
        }
    }

    /// Sends one batch. Returns false if the worker's socket did not accept it.
    fn send(&mut self, sending: PipelineBatch, now: Timestamp) -> bool {
        let link = self.links.iter_mut().find(|link| link.worker == sending.worker);
        let link = link.expect("links and lanes come and go together");
        match link.send(&sending) {
            Ok(true) => {
                trace_event::record_sent(&sending, &link.location, now);
                self.scheduler.confirm_sent(sending, now);
                true
            }
            Ok(false) => {
                self.scheduler.return_unsent(sending, now);
                false
            }
            Err(why) => {
                for request in sending.requests {
                    self.fail(request, RequestFailure::Internal(why.clone()), now);
                }
                true
            }
        }
    }

    /// Records that a client no longer waits for an answer, and makes room in the queue.
    pub(crate) fn give_up(&mut self, how: Unanswered, waited: Duration, now: Timestamp) {
        self.record_unanswered(how, waited, now);
        self.scheduler.give_up();
    }

    /// Removes an answered batch from its lane. Returns `None` if the worker had no such batch.
    pub(crate) fn take_answered(
        &mut self,
        worker: WorkerId,
        batch: u64,
        now: Timestamp,
    ) -> Option<InFlightBatch> {
        let taken = self.scheduler.take_batch(worker, batch, now)?;
        if let Some(link) = self.link_mut(worker) {
            link.release(batch);
        }
        Some(taken)
    }

    pub(crate) fn complete(
        &mut self,
        worker: WorkerId,
        batch: &InFlightBatch,
        execution: Duration,
        now: Timestamp,
    ) {
        let completion = self.scheduler.record_completion(worker, batch, execution);
        let times =
            self.link_mut(worker).and_then(|link| link.shapes.as_mut()).filter(|_| completion.observed);
        if let Some((times, request)) = times.zip(batch.requests.first()) {
            times.observe(&request.shape, batch.rows, execution);
        }
        if completion.first {
            self.report(LaneEvent::FirstAnswer(worker, now));
        }
        self.record_answered(worker, batch.requests.len());
        self.recycle(worker, batch.slot, now);
    }

    pub(crate) fn recycle(&mut self, worker: WorkerId, slot: u8, now: Timestamp) {
        if self.scheduler.recycle(worker, slot) {
            self.report(LaneEvent::Drained(worker));
        }
        self.dispatch(now);
    }

    pub(crate) fn remove_dead(&mut self, worker: WorkerId, now: Timestamp) {
        if self.is_idle(worker) {
            self.idle_ended.truncate(MAX_IDLE_ENDED - 1);
            self.idle_ended.push_front(worker);
        }
        self.record_exit(worker, now);
        self.condemn(worker, now);
        self.scheduler.detach(worker);
        self.links.retain(|link| link.worker != worker);
        self.publish_sleep();
        self.report(LaneEvent::Gone(worker));
    }

    /// Returns whether the worker is idle. If the worker has ended and is still remembered, returns
    /// whether it was idle when it ended.
    pub(crate) fn is_idle(&self, worker: WorkerId) -> bool {
        self.scheduler.lane(worker).map_or(self.idle_ended.contains(&worker), PipelineLane::is_idle)
    }

    /// Treats a worker as dead, and sends it no more batches. The death counts against the requests
    /// in the executing batch. These requests are retried unless too many deaths count against
    /// them. Requests that had not begun to execute are retried, and the death does not count
    /// against them.
    pub(crate) fn condemn(&mut self, worker: WorkerId, now: Timestamp) {
        let served = self.scheduler.stop_sending(worker);
        let AbandonedRequests { executing, behind } = self.take_back(worker);
        [&executing, &behind]
            .into_iter()
            .for_each(|requests| trace_event::record_loss(requests, LostReason::Died, now));
        if served || !(executing.is_empty() && behind.is_empty()) {
            self.scheduler.record_disturbance();
        }
        self.put_back(behind, now);
        let again = self.blame(executing, now);
        self.put_back(again, now);
        self.dispatch(now);
    }

    /// Takes a worker's requests back. The requests' memory stays reserved, because the worker may
    /// still read it.
    pub(crate) fn take_back(&mut self, worker: WorkerId) -> AbandonedRequests<Shapes, PendingRequest> {
        let Self { scheduler, links, .. } = self;
        let link = links.iter_mut().find(|link| link.worker == worker);
        if let Some((link, lane)) = link.zip(scheduler.lane(worker)) {
            link.hold(lane.in_flight());
        }
        scheduler.take_back(worker)
    }

    /// Counts a worker's death against the requests that were executing. Returns the requests that
    /// should be retried.
    pub(crate) fn blame(&mut self, requests: Vec<WaitingRequest>, now: Timestamp) -> Vec<WaitingRequest> {
        let was_alone = requests.len() == 1;
        let mut again = Vec::with_capacity(requests.len());
        for mut request in requests {
            if request.item.continues_stream() {
                if self.quarantine.record_death_in_step(&request.item.memory, was_alone, now) {
                    self.report(LaneEvent::PoisonConfirmed);
                }
                self.fail(request, died_in_step(), now);
                continue;
            }
            request.item.deaths += 1;
            // A suspect runs first. Otherwise other requests could kill workers before the suspect
            // is confirmed or cleared.
            request.level = SUSPECT_LEVEL;
            match blame::after_death(request.item.deaths, was_alone) {
                blame::Blame::Again => again.push(request),
                blame::Blame::AgainAlone => {
                    request.alone = true;
                    again.push(request);
                }
                blame::Blame::Fail => {
                    let why = format!(
                        "{} workers died or hung while they executed this request",
                        request.item.deaths
                    );
                    self.report(LaneEvent::PoisonConfirmed);
                    self.quarantine(&request.item.memory, now);
                    self.fail(request, RequestFailure::Internal(why), now);
                }
            }
        }
        again
    }

    /// Puts a request's inputs into quarantine, and refuses waiting requests with equal inputs.
    fn quarantine(&mut self, inputs: &Reservation, now: Timestamp) {
        self.quarantine.add(inputs, now);
        let Self { scheduler, quarantine, .. } = self;
        let mut pause = Duration::ZERO;
        let equal = scheduler.take_if(|item| match quarantine.admit(&item.memory, now) {
            Admission::Refused(until) => {
                pause = until;
                true
            }
            Admission::Free | Admission::OnTrial => false,
        });
        for request in equal {
            self.fail(request, quarantined(pause), now);
        }
    }

    /// Queues the requests of a failed batch so that each request runs alone, and only the faulty
    /// request fails.
    pub(crate) fn try_alone(&mut self, mut requests: Vec<WaitingRequest>, now: Timestamp) {
        for request in &mut requests {
            request.alone = true;
        }
        self.put_back(requests, now);
    }

    /// Puts requests that ran without an answer back into the queue. If the model is shut, refuses
    /// these requests.
    pub(crate) fn put_back(&mut self, mut requests: Vec<WaitingRequest>, now: Timestamp) {
        for step in requests.extract_if(.., |request| request.item.continues_stream()) {
            self.fail(step, broken_off(), now);
        }
        for request in &mut requests {
            // A stream without an answer opens again, in another worker.
            request.item.stream = None;
            request.item.claim.set_opened(None);
        }
        if let Err(why) = self.gate.open() {
            let why = why.to_owned();
            return self.refuse(requests, &why, now);
        }
        self.stats.retried += requests.len() as u64;
        trace_event::record_queued(&requests, now);
        self.scheduler.put_back(requests, now);
    }

    pub(crate) fn fail(&mut self, request: WaitingRequest, failure: RequestFailure, now: Timestamp) {
        if request.item.continues_stream() {
            self.stats.totals.streams_failed += 1;
        } else if request.item.claim.take() {
            let waited = now.since(request.arrived);
            match failure {
                RequestFailure::Invalid(_) => self.stats.count_invalid(waited),
                _ => self.record_unanswered(Unanswered::Failed, waited, now),
            }
        }
        reply(request, Err(failure));
    }

    /// Refuses accepted requests because the model no longer accepts requests.
    pub(crate) fn refuse(&mut self, requests: Vec<WaitingRequest>, why: &str, now: Timestamp) {
        for request in requests {
            trace_event::record_refusal(request.item.journal.as_ref(), CountedRefusal::NotReady);
            if request.item.claim.take() {
                self.record_refusal(CountedRefusal::NotReady, now.since(request.arrived), now);
            }
            reply(request, Err(RequestFailure::Unavailable(why.to_owned())));
        }
    }

    /// Reports an event to the controller. Never blocks.
    pub(crate) fn report(&self, event: LaneEvent) {
        // A closed channel needs no report, because it only means that the model's controller has
        // ended. When a model is removed, its controller ends before its last lane.
        if let Err(TrySendError::Full(event)) = self.events_tx.try_send(event) {
            tracing::error!(
                model = &*self.name,
                ?event,
                "the model's controller is overloaded and misses this event; if the model stops answering or a share change does not end, restart the supervisor, and report this line as a bug"
            );
        }
    }

    pub(crate) fn link_mut(&mut self, worker: WorkerId) -> Option<&mut WorkerLink> {
        self.links.iter_mut().find(|link| link.worker == worker)
    }
}

fn quarantined(pause: Duration) -> RequestFailure {
    RequestFailure::Internal(format!(
        "workers died or hung while they executed these inputs, so the server refuses them; try again after {} s at the earliest",
        pause.as_secs() + 1
    ))
}

/// Sends the result of a request to its client. If the client has disconnected, the result is
/// dropped.
pub(crate) fn reply(request: WaitingRequest, outcome: Result<WorkerAnswer, RequestFailure>) {
    match request.item.reply {
        ReplyTarget::Client(reply_tx) => drop(reply_tx.send(outcome)),
        ReplyTarget::Stream(stream) => {
            let more = outcome.is_ok();
            stream.add(outcome.map(|answer| answer.outputs), more);
        }
    }
}
