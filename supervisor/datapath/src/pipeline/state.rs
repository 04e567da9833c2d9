//! The state of a pipeline, under one lock: the queue, the lanes, and which lane serves.
//!
//! Everything here is short and never waits. A request that finds a free slot is on its way to the
//! worker before its client's task gives the lock back, so no other task has to wake for it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use shadowslice_policy::blame;
use shadowslice_policy::scheduler::{
    self, AbandonedRequests, NextAction, SUSPECT_LEVEL, Scheduler, SchedulerWait,
};
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::Timestamp;
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;

use super::counts::Refusal;
use super::facts::LaneFact;
use super::gate::Gate;
use super::link::{Lane, Link, Sending};
use super::memory::Reservation;
use super::note;
use super::pending::{InFlight, Pending, Shapes, Waiting};
use super::quarantine::{Admission, Quarantine};
use super::request::Failure;
use super::stall::StallMeter;
use super::stats::Stats;
use super::streams::{Given, broken_off, died_in_step};
use crate::trace::{Handover, Lost};

/// Workers that are remembered: more than a model has at a time, as several may go at once.
const WENT: usize = 8;

/// A batch that a worker did not take, though it had room, is sent again after this time: an idle
/// worker has no answer coming that would start another try. If memory for the message was missing,
/// it may be free then; a worker that is gone is found to be gone before.
const SEND_AGAIN: Duration = Duration::from_millis(5);

type Refused = scheduler::RefusedRequest<Shapes, Pending>;

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) name: Arc<str>,
    pub(crate) gate: Gate,
    pub(crate) scheduler: Scheduler<Shapes, Pending>,
    /// One link for each of the scheduler's lanes.
    pub(crate) links: Vec<Link>,
    pub(crate) stall: StallMeter,
    pub(crate) stats: Stats,
    pub(crate) facts: mpsc::Sender<LaneFact>,
    /// When the pipeline must look again though nothing happens.
    pub(crate) alarm: Option<Timestamp>,
    /// When it is looked at next, in vain perhaps.
    pub(crate) armed: Option<Timestamp>,
    /// The last change of the lane that serves.
    pub(crate) routed: Option<Handover>,
    /// Of the last workers that went, those that had nothing to do then.
    pub(crate) went_idle: VecDeque<WorkerId>,
    pub(crate) quarantine: Quarantine,
}

impl State {
    pub(crate) fn accept(&mut self, mut request: Waiting, now: Timestamp) -> Result<(), Failure> {
        if self.gate.open().is_err() {
            let failure = self.not_ready();
            self.turn_away(Refusal::NotReady, request.rows, now);
            note::refused(request.item.journal.as_ref(), Refusal::NotReady);
            return Err(failure);
        }
        match self.quarantine.admit(&request.item.memory, now) {
            Admission::Free => {}
            Admission::OnTrial => (request.alone, request.item.deaths) = (true, blame::ON_TRIAL),
            Admission::Refused(pause) => {
                self.turn_away(Refusal::Quarantined, request.rows, now);
                note::refused(request.item.journal.as_ref(), Refusal::Quarantined);
                return Err(quarantined(pause));
            }
        }
        let journal = request.item.journal.clone();
        if let Err(Refused { request, why }) = self.scheduler.accept(request, now) {
            let (why, failure) = match why {
                scheduler::RefusalReason::QueueFull => (Refusal::QueueFull, self.queue_full()),
                _ => (Refusal::Late, too_late(&self.name, &request)),
            };
            note::refused(journal.as_ref(), why);
            self.stats.rejected(why, Duration::ZERO, now);
            return Err(failure);
        }
        if let Some(journal) = journal {
            journal.queued(now);
        }
        self.stats.counts.accepted += 1;
        self.dispatch(now);
        Ok(())
    }

    fn queue_full(&self) -> Failure {
        let (name, waiting) = (&self.name, self.scheduler.queued());
        Failure::Unavailable(format!("the queue of model '{name}' is full: {waiting} requests wait"))
    }

    pub(crate) fn not_ready(&self) -> Failure {
        let why = self.gate.open().err().unwrap_or("the model is not described yet");
        Failure::Unavailable(format!("model '{}' is not ready: {why}", self.name))
    }

    pub(crate) fn turn_away(&mut self, why: Refusal, rows: u32, now: Timestamp) {
        // The others tell nothing of the model's load.
        if why == Refusal::MemoryFull {
            self.scheduler.record_refused_arrival(rows);
        }
        self.stats.rejected(why, Duration::ZERO, now);
    }

    /// Sends all that can be sent, and leaves in `alarm` when to look again.
    pub(crate) fn dispatch(&mut self, now: Timestamp) {
        let rest = self.send_all(now);
        self.stall.note(matches!(rest, None | Some(SchedulerWait::NoLane)), now);
        let wait = match rest {
            Some(SchedulerWait::Until(wait)) => Some(wait),
            Some(SchedulerWait::Idle | SchedulerWait::NoLane) => None,
            None => Some(now + SEND_AGAIN),
        };
        self.alarm = [wait, self.next_look(now)].into_iter().flatten().min();
    }

    /// What rests then, and why; `None` where a batch was ready and its worker did not take it.
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

    /// Sends one batch. False if the worker did not take it.
    fn send(&mut self, sending: Sending, now: Timestamp) -> bool {
        let link = self.links.iter_mut().find(|link| link.worker == sending.worker);
        let link = link.expect("links and lanes come and go together");
        match link.send(&sending) {
            Ok(true) => {
                note::sent(&sending, &link.place, now);
                self.scheduler.confirm_sent(sending, now);
                true
            }
            Ok(false) => {
                self.scheduler.return_unsent(sending, now);
                false
            }
            Err(why) => {
                for request in sending.requests {
                    self.fail(request, Failure::Internal(why.clone()), now);
                }
                true
            }
        }
    }

    /// Turns a request away that was accepted, and is too late now.
    pub(crate) fn reject(&mut self, Refused { request, why }: Refused, now: Timestamp) {
        let waited = now.since(request.arrived);
        let failure = match why {
            scheduler::RefusalReason::Overdue => Failure::Unavailable(format!(
                "the server is overloaded: the request waited {} ms, past its deadline",
                waited.as_millis()
            )),
            _ => too_late(&self.name, &request),
        };
        note::refused(request.item.journal.as_ref(), Refusal::Late);
        if request.item.claim.take() {
            self.stats.rejected(Refusal::Late, waited, now);
        }
        reply(request, Err(failure));
    }

    /// A request was not answered within its own timeout, `waited` after it came. The policy counts
    /// it as a miss: a client with a timeout no longer than the SLO must not hide a miss by it.
    pub(crate) fn timed_out(&mut self, waited: Duration, now: Timestamp) {
        self.scheduler.record_miss();
        self.stats.failed(waited, now);
        self.scheduler.give_up();
    }

    /// A client gave a request up, `waited` after it came: a miss if that was after its SLO.
    pub(crate) fn cancelled(&mut self, waited: Duration, now: Timestamp) {
        self.left(waited, now);
        self.scheduler.give_up();
    }

    /// Counts a request as given up that doesn't wait any more, `waited` after it came.
    pub(crate) fn left(&mut self, waited: Duration, now: Timestamp) {
        if waited >= self.scheduler.slo() {
            self.scheduler.record_miss();
        }
        self.stats.cancelled(waited, now);
    }

    /// A worker has answered: takes the batch off its lane. `None` if the worker had no such batch.
    pub(crate) fn answered(&mut self, worker: WorkerId, batch: u64, now: Timestamp) -> Option<InFlight> {
        let taken = self.scheduler.take_batch(worker, batch, now)?;
        if let Some(link) = self.link_mut(worker) {
            link.release(batch);
        }
        Some(taken)
    }

    pub(crate) fn completed(
        &mut self,
        worker: WorkerId,
        batch: &InFlight,
        execution: Duration,
        now: Timestamp,
    ) {
        let done = self.scheduler.record_completion(worker, batch, execution);
        let times = self.link_mut(worker).and_then(|link| link.shapes.as_mut()).filter(|_| done.observed);
        if let Some((times, request)) = times.zip(batch.requests.first()) {
            times.observe(&request.shape, batch.rows, execution);
        }
        if done.first {
            self.report(LaneFact::FirstAnswer(worker, now));
        }
        self.recycle(worker, batch.slot, now);
    }

    pub(crate) fn recycle(&mut self, worker: WorkerId, slot: u8, now: Timestamp) {
        if self.scheduler.recycle(worker, slot) {
            self.report(LaneFact::Drained(worker));
        }
        self.dispatch(now);
    }

    pub(crate) fn died(&mut self, worker: WorkerId, now: Timestamp) {
        if self.is_idle(worker) {
            self.went_idle.truncate(WENT - 1);
            self.went_idle.push_front(worker);
        }
        self.condemn(worker, now);
        self.scheduler.detach(worker);
        self.links.retain(|link| link.worker != worker);
        self.report(LaneFact::Gone(worker));
    }

    /// For a worker that is gone: whether it had nothing to do then, as far as is remembered.
    pub(crate) fn is_idle(&self, worker: WorkerId) -> bool {
        self.scheduler.lane(worker).map_or(self.went_idle.contains(&worker), Lane::is_idle)
    }

    /// A worker is dead or as good as dead: the requests that it executed are blamed and, if they
    /// may, tried again; the requests behind them are tried again without blame. Nothing more is
    /// sent to the worker.
    pub(crate) fn condemn(&mut self, worker: WorkerId, now: Timestamp) {
        let served = self.scheduler.stop_sending(worker);
        let AbandonedRequests { executing, behind } = self.take_back(worker);
        [&executing, &behind].into_iter().for_each(|requests| note::lost(requests, Lost::Died, now));
        if served || !(executing.is_empty() && behind.is_empty()) {
            self.scheduler.record_disturbance();
        }
        self.put_back(behind, now);
        let again = self.blamed(executing, now);
        self.put_back(again, now);
        self.dispatch(now);
    }

    /// The worker may still read the memory of its requests, which stays taken.
    pub(crate) fn take_back(&mut self, worker: WorkerId) -> AbandonedRequests<Shapes, Pending> {
        let Self { scheduler, links, .. } = self;
        let link = links.iter_mut().find(|link| link.worker == worker);
        if let Some((link, lane)) = link.zip(scheduler.lane(worker)) {
            link.hold(lane.in_flight());
        }
        scheduler.take_back(worker)
    }

    /// Counts a death against requests that were executing; returns the requests to try again.
    pub(crate) fn blamed(&mut self, requests: Vec<Waiting>, now: Timestamp) -> Vec<Waiting> {
        let was_alone = requests.len() == 1;
        let mut again = Vec::with_capacity(requests.len());
        for mut request in requests {
            if request.item.stream.is_some() {
                if self.quarantine.died_in_step(&request.item.memory, now) {
                    self.report(LaneFact::PoisonConfirmed);
                }
                self.fail(request, died_in_step(), now);
                continue;
            }
            request.item.deaths += 1;
            // Else others would kill workers before this one has proved anything.
            request.level = SUSPECT_LEVEL;
            match blame::after_death(request.item.deaths, was_alone) {
                blame::Blame::Again => again.push(request),
                blame::Blame::AgainAlone => {
                    request.alone = true;
                    again.push(request);
                }
                blame::Blame::Fail => {
                    let why = format!("{} workers died executing this request", request.item.deaths);
                    self.report(LaneFact::PoisonConfirmed);
                    self.quarantine(&request.item.memory, now);
                    self.fail(request, Failure::Internal(why), now);
                }
            }
        }
        again
    }

    /// Equal requests that wait are refused with it.
    fn quarantine(&mut self, inputs: &Reservation, now: Timestamp) {
        self.quarantine.proved(inputs, now);
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

    /// Requests that failed together are tried one by one, so that only the guilty request fails.
    pub(crate) fn try_alone(&mut self, mut requests: Vec<Waiting>, now: Timestamp) {
        for request in &mut requests {
            request.alone = true;
        }
        self.put_back(requests, now);
    }

    /// Has requests that ran without an answer wait again, unless the model is shut.
    pub(crate) fn put_back(&mut self, mut requests: Vec<Waiting>, now: Timestamp) {
        for step in requests.extract_if(.., |request| request.item.stream.is_some()) {
            self.fail(step, broken_off(), now);
        }
        if let Err(why) = self.gate.open() {
            let why = why.to_owned();
            return self.refuse(requests, &why, now);
        }
        self.stats.counts.retried += requests.len() as u64;
        note::queued(&requests, now);
        self.scheduler.put_back(requests, now);
    }

    pub(crate) fn fail(&mut self, request: Waiting, failure: Failure, now: Timestamp) {
        if request.item.stream.is_some() {
            self.stats.totals.streams_failed += 1;
        } else if request.item.claim.take() {
            let waited = now.since(request.arrived);
            match failure {
                Failure::Invalid(_) => self.stats.invalid(waited),
                _ => self.stats.failed(waited, now),
            }
        }
        reply(request, Err(failure));
    }

    /// Turns requests away that were accepted, as the model serves no more.
    pub(crate) fn refuse(&mut self, requests: Vec<Waiting>, why: &str, now: Timestamp) {
        for request in requests {
            note::refused(request.item.journal.as_ref(), Refusal::NotReady);
            if request.item.claim.take() {
                self.stats.rejected(Refusal::NotReady, now.since(request.arrived), now);
            }
            reply(request, Err(Failure::Unavailable(why.to_owned())));
        }
    }

    /// Never waits.
    pub(crate) fn report(&self, fact: LaneFact) {
        // As a model goes, its controller does so before the last of its lanes.
        if let Err(TrySendError::Full(fact)) = self.facts.try_send(fact) {
            tracing::error!(?fact, "a lane's fact is lost: the controller is far behind");
        }
    }

    pub(crate) fn link_mut(&mut self, worker: WorkerId) -> Option<&mut Link> {
        self.links.iter_mut().find(|link| link.worker == worker)
    }
}

fn quarantined(pause: Duration) -> Failure {
    Failure::Internal(format!(
        "workers died executing these inputs; they are refused, and tried again after {} s at the earliest",
        pause.as_secs() + 1
    ))
}

fn too_late(model: &str, request: &Waiting) -> Failure {
    let due = request.deadline.since(request.arrived).as_secs_f64() * 1e3;
    Failure::Unavailable(format!(
        "model '{model}' could not answer the request within {due} ms, its SLO or timeout, under the present load"
    ))
}

/// A client that went away is no matter.
pub(crate) fn reply(request: Waiting, outcome: Result<Given, Failure>) {
    drop(request.item.reply.send(outcome));
}
