//! What a pipeline knows, under one lock: the queue, the lanes, and which of them serves.
//!
//! Everything here is short and never waits. A request that finds a free slot is on its way to the
//! worker before its client's task gives the lock back, so no other task has to wake for it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use shadowslice_policy::batcher::{Next, Taken};
use shadowslice_policy::blame;
use shadowslice_policy::late::Lateness;
use shadowslice_policy::sharing::Door;
use shadowslice_shared::units::Moment;

use super::Rules;
use super::counts::Refusal;
use super::door::{self, Doorkeeper};
use super::facts::{LaneFact, Reporter};
use super::lane::{Duty, InFlight, Lane, SendFailure, Waiting, WorkerId};
use super::note;
use super::queues::Queues;
use super::request::{Failure, Output};
use super::stall::StallMeter;
use super::stats::Stats;
use crate::trace::{Handover, Lost};

/// Workers that went and are remembered: more than a model has at a time, as several may go at once.
const WENT: usize = 8;

/// A batch that a lane did not take, though it had room, is sent again after this: an idle one has no answer coming that
/// would say so. What has no memory for a message now may have it then, and who is gone is missed before.
const SEND_AGAIN: Duration = Duration::from_millis(5);

/// Requests that were given up are taken out of the queue once they may be one in so many of those in it: for each, about as many are
/// looked at.
const GIVEN_UP_ONE_IN: usize = 8;

/// Whether requests are taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Gate {
    /// Yes. Between a worker's death and its successor they wait.
    Open,
    /// No, and why.
    Shut(String),
}

/// What sending all that can be sent leaves, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Left {
    /// Nothing, or what waits for a slot.
    Nothing,
    /// What waits until then for company, or for its turn.
    Until(Moment),
    /// A batch that was ready, as no lane serves.
    Ready,
    /// A batch that was ready, and its lane did not take it.
    Blocked,
}

/// The state of a pipeline.
#[derive(Debug)]
pub(crate) struct State {
    /// The model's name.
    pub(crate) name: Arc<str>,
    /// Every request's deadline, from its arrival.
    pub(crate) slo: Duration,
    pub(crate) gate: Gate,
    pub(crate) door: Doorkeeper,
    pub(crate) queue: Queues,
    /// How many in it may have been given up by their clients; some of those may execute.
    pub(crate) given_up: usize,
    pub(crate) lanes: Vec<Lane>,
    pub(crate) stall: StallMeter,
    pub(crate) stats: Stats,
    /// Whether late requests are refused under overload; `None`: they are served.
    pub(crate) lateness: Option<Lateness>,
    pub(crate) reporter: Reporter,
    /// When the pipeline must look again though nothing happens.
    pub(crate) alarm: Option<Moment>,
    /// When somebody looks next, in vain perhaps.
    pub(crate) armed: Option<Moment>,
    pub(crate) next_batch: u64,
    /// The last change of the lane that serves.
    pub(crate) routed: Option<Handover>,
    /// Of the workers that went last, those that had nothing to do then.
    pub(crate) went_idle: VecDeque<WorkerId>,
}

impl State {
    /// Takes a request in, or turns it away.
    pub(crate) fn accept(&mut self, request: Waiting, now: Moment) -> Result<(), Failure> {
        if let Gate::Shut(why) = &self.gate {
            let failure = Failure::not_ready(&self.name, why);
            return Err(self.turn_away(&request, Refusal::NotReady, failure, now));
        }
        self.note_service(now);
        let lane = self.serving().map(|lane| &self.lanes[lane]);
        let before = self.queue.rows_before(request.item.level);
        if self.door.refuses(&request, before, lane, now) {
            let failure = door::too_late(&self.name, &request);
            return Err(self.turn_away(&request, Refusal::Late, failure, now));
        }
        let (rows, journal) = (request.rows, request.item.journal.clone());
        if let Err(request) = self.enqueue(request) {
            let why =
                format!("the queue of model '{}' is full: {} requests wait", self.name, self.queue.len());
            return Err(self.turn_away(&request, Refusal::QueueFull, Failure::Unavailable(why), now));
        }
        if let Some(journal) = journal {
            journal.queued(now);
        }
        self.stats.accepted(rows);
        self.dispatch(now);
        Ok(())
    }

    fn turn_away(&mut self, request: &Waiting, refusal: Refusal, failure: Failure, now: Moment) -> Failure {
        note::refused(request.item.journal.as_ref(), refusal);
        self.stats.turned_away(refusal, request.rows, now);
        failure
    }

    /// The policy opens or narrows the door.
    pub(crate) fn set_door(&mut self, door: Door, now: Moment) {
        self.door.set(door);
        self.dispatch(now);
    }

    /// The configuration has changed. What was queued keeps its deadline.
    pub(crate) fn set_rules(&mut self, rules: Rules, now: Moment) {
        let Rules { slo, max_delay, reject_late } = rules;
        let before = std::mem::replace(&mut self.slo, slo.latency);
        self.stats.set_slo(slo);
        if before != slo.latency || self.lateness.is_some() != reject_late {
            self.lateness = reject_late.then(|| Lateness::new(slo.latency));
        }
        self.door.configure(max_delay, !reject_late);
        self.dispatch(now);
    }

    /// The index of the lane that serves.
    pub(crate) fn serving(&self) -> Option<usize> {
        self.lanes.iter().position(|lane| lane.duty == Duty::Serving)
    }

    /// Sends all that can be sent, and leaves in `alarm` when to look again.
    pub(crate) fn dispatch(&mut self, now: Moment) {
        self.note_service(now);
        let left = match self.serving() {
            Some(lane) => self.send_to(lane, now),
            None if self.queue.is_empty() => Left::Nothing,
            None => Left::Ready,
        };
        self.stall.note(matches!(left, Left::Ready | Left::Blocked), now);
        self.note_queue(now);
        self.note_busy(now);
        let wait = match left {
            Left::Until(wait) => Some(wait),
            Left::Blocked => Some(now + SEND_AGAIN),
            Left::Nothing | Left::Ready => None,
        };
        self.alarm = [wait, self.next_look(now)].into_iter().flatten().min();
    }

    fn send_to(&mut self, lane: usize, now: Moment) -> Left {
        let limits = self.door.limits();
        while !self.queue.is_empty() && self.lanes[lane].has_room() {
            if let Some(until) = self.door.holds_until(&self.lanes[lane], now) {
                return Left::Until(until);
            }
            let punctual = self.door.punctual(&self.lanes[lane], now);
            match self.queue.next(&limits, punctual.as_ref(), now) {
                Next::Run(Taken { batch, late }) => {
                    self.refuse_late(late, now);
                    if !self.send(lane, batch, now) {
                        return Left::Blocked;
                    }
                }
                Next::WaitUntil(until) => return Left::Until(until),
                Next::Idle => break,
            }
        }
        Left::Nothing
    }

    /// A client gave a request up that had no answer. It must not keep others out for long.
    pub(crate) fn give_up(&mut self) {
        self.given_up += 1;
        if self.given_up * GIVEN_UP_ONE_IN >= self.queue.len() {
            self.forget_gone();
        }
    }

    /// Puts a request into the queue, if need be in the place of those that nobody waits for any more.
    pub(crate) fn enqueue(&mut self, request: Waiting) -> Result<(), Box<Waiting>> {
        self.queue.push(request).or_else(|request| {
            self.forget_gone();
            self.queue.push(*request)
        })
    }

    /// Takes the requests that nobody waits for any more out of the queue.
    pub(crate) fn forget_gone(&mut self) {
        // All of the queue is looked at, under everybody's lock.
        if self.given_up == 0 {
            return;
        }
        self.given_up = 0;
        self.queue.take_if(|ticket| ticket.claim.is_taken());
    }

    /// Sends one batch, less the requests that nobody waits for or that come too late. False if the
    /// lane did not take it.
    fn send(&mut self, lane: usize, mut batch: Vec<Waiting>, now: Moment) -> bool {
        self.leave_out(&mut batch, now);
        if batch.is_empty() {
            return true;
        }
        self.queue.put_back(self.lanes[lane].part(&mut batch));
        self.next_batch += 1;
        match self.lanes[lane].send(self.next_batch, batch, now) {
            Ok(()) => true,
            Err(SendFailure::Blocked(batch)) => {
                self.queue.put_back(batch);
                false
            }
            Err(SendFailure::TooLarge(batch, error)) => {
                for request in batch {
                    self.fail(request, Failure::Internal(error.clone()), now);
                }
                true
            }
        }
    }

    /// Refuses requests that cannot be answered in time any more.
    fn refuse_late(&mut self, mut late: Vec<Waiting>, now: Moment) {
        late.retain(|request| !request.item.claim.is_taken());
        for request in late {
            let failure = door::too_late(&self.name, &request);
            reject(&mut self.stats, request, failure, now);
        }
    }

    /// Takes the requests out of a batch that nobody waits for, or that overload has made too late.
    fn leave_out(&mut self, batch: &mut Vec<Waiting>, now: Moment) {
        batch.retain(|request| !request.item.claim.is_taken());
        let Some(lateness) = self.lateness.as_ref().filter(|_| !self.door.refuses_late()) else { return };
        for request in batch.extract_if(.., |request| lateness.refuses(request.deadline, now)) {
            let waited = now.since(request.arrived).as_millis();
            let why = format!("the server is overloaded: the request waited {waited} ms, past its deadline");
            reject(&mut self.stats, request, Failure::Unavailable(why), now);
        }
    }

    fn note_service(&mut self, now: Moment) {
        let serves = self.serving().is_some_and(|lane| !self.lanes[lane].is_stalled(now));
        self.door.note_service(serves, now);
    }

    fn note_queue(&mut self, now: Moment) {
        if let Some(lateness) = &mut self.lateness {
            if self.queue.is_empty() { lateness.emptied() } else { lateness.queued(now) }
        }
        if self.queue.is_empty() {
            self.door.emptied(now);
        }
    }

    fn note_busy(&mut self, now: Moment) {
        let executes = self.serving().is_some_and(|lane| !self.lanes[lane].executes_nothing());
        self.stats.recent.note_busy(executes, now);
    }

    /// A worker has answered: takes the batch off its lane. `None` if it had no such batch.
    pub(crate) fn answered(&mut self, worker: WorkerId, batch: u64, now: Moment) -> Option<InFlight> {
        let taken = self.lane_mut(worker)?.take(batch, now);
        self.note_busy(now);
        taken
    }

    /// The answer to a batch was good and has been copied.
    pub(crate) fn completed(&mut self, worker: WorkerId, batch: &InFlight, execution: Duration, now: Moment) {
        let &InFlight { slot, rows, groups, ref requests, .. } = batch;
        let Some(lane) = self.lane_mut(worker) else { return };
        // On another partition it says nothing of the SMs on which the lane is now.
        let here = groups == lane.groups;
        if here {
            lane.predictor.observe(rows, execution);
        }
        if let Some((times, request)) = lane.shapes.as_mut().zip(requests.first()).filter(|_| here) {
            times.observe(&request.shape, rows, execution);
        }
        let first = here && !std::mem::replace(&mut lane.proven, true);
        if lane.duty == Duty::Serving {
            self.stats.recent.executed(rows, execution);
        }
        if first {
            self.reporter.report(LaneFact::FirstAnswer(worker, now));
        }
        self.recycle(worker, slot, now);
    }

    /// The answer in `slot` is done with; the lane has room again.
    pub(crate) fn recycle(&mut self, worker: WorkerId, slot: u8, now: Moment) {
        let Some(lane) = self.lanes.iter_mut().find(|lane| lane.worker == worker) else { return };
        lane.recycle(slot);
        if lane.duty == Duty::Draining && lane.is_empty() {
            lane.duty = Duty::Standing;
            self.reporter.report(LaneFact::Drained(worker));
        }
        self.dispatch(now);
    }

    /// A worker is gone, and its lane with it.
    pub(crate) fn died(&mut self, worker: WorkerId, now: Moment) {
        if self.is_idle(worker) {
            self.went_idle.truncate(WENT - 1);
            self.went_idle.push_front(worker);
        }
        self.condemn(worker, now);
        self.lanes.retain(|lane| lane.worker != worker);
        self.reporter.report(LaneFact::Gone(worker));
    }

    /// Whether `worker` has nothing to do; of one that is gone, whether it had not, as far as that is known still.
    pub(crate) fn is_idle(&self, worker: WorkerId) -> bool {
        let lane = self.lanes.iter().find(|lane| lane.worker == worker);
        lane.map_or(self.went_idle.contains(&worker), |lane| lane.in_flight.is_empty())
    }

    /// A worker is dead or as good as dead: what it executed is blamed and, if it may, tried again; what
    /// stood behind that is simply tried again. Nothing more is sent to it.
    pub(crate) fn condemn(&mut self, worker: WorkerId, now: Moment) {
        let Some(lane) = self.lane_mut(worker) else { return };
        let served = std::mem::replace(&mut lane.duty, Duty::Standing) == Duty::Serving;
        let (executing, behind) = lane.abandon();
        [&executing, &behind].into_iter().for_each(|requests| note::lost(requests, Lost::Died, now));
        let mut back = self.blamed(executing, now);
        back.extend(behind);
        if served || !back.is_empty() {
            self.disturbed();
        }
        self.put_back(back, now);
        self.dispatch(now);
    }

    /// Counts a death against requests that were executing; returns those to try again.
    pub(crate) fn blamed(&mut self, requests: Vec<Waiting>, now: Moment) -> Vec<Waiting> {
        let was_alone = requests.len() == 1;
        let mut again = Vec::with_capacity(requests.len());
        for mut request in requests {
            request.item.deaths += 1;
            match blame::after_death(request.item.deaths, was_alone) {
                blame::Verdict::Again => again.push(request),
                blame::Verdict::AgainAlone => {
                    request.alone = true;
                    again.push(request);
                }
                blame::Verdict::Fail => {
                    let why = format!("{} workers died executing this request", request.item.deaths);
                    self.reporter.report(LaneFact::Proven);
                    self.fail(request, Failure::Internal(why), now);
                }
            }
        }
        again
    }

    /// Requests that failed together are tried one by one, so that only the guilty one fails.
    pub(crate) fn try_alone(&mut self, mut requests: Vec<Waiting>, now: Moment) {
        for request in &mut requests {
            request.alone = true;
        }
        self.put_back(requests, now);
    }

    /// Has requests that ran without an answer wait again, unless nobody will serve them any more.
    pub(crate) fn put_back(&mut self, requests: Vec<Waiting>, now: Moment) {
        if let Gate::Shut(why) = &self.gate {
            let why = why.clone();
            return self.refuse(requests, &why, now);
        }
        if !requests.is_empty() {
            self.door.put_back(now);
        }
        self.given_up += requests.iter().filter(|request| request.item.claim.is_taken()).count();
        self.stats.counts.retried += requests.len() as u64;
        note::queued(&requests, now);
        self.queue.put_back(requests);
    }

    /// Until the queue has been empty once, lateness is not the load's doing.
    pub(crate) fn disturbed(&mut self) {
        if let Some(lateness) = &mut self.lateness {
            lateness.disturbed();
        }
    }

    /// Fails a request that was accepted.
    pub(crate) fn fail(&mut self, request: Waiting, failure: Failure, now: Moment) {
        if request.item.claim.take() {
            self.stats.failed(now.since(request.arrived), now);
        }
        reply(request, Err(failure));
    }

    /// Refuses all that waits, and all that comes, be it back from a worker.
    pub(crate) fn shut(&mut self, why: &str, now: Moment) {
        self.gate = Gate::Shut(why.to_owned());
        let waiting = self.queue.drain_all();
        self.refuse(waiting, why, now);
        self.dispatch(now);
    }

    fn refuse(&mut self, requests: Vec<Waiting>, why: &str, now: Moment) {
        for request in requests {
            self.fail(request, Failure::Unavailable(why.to_owned()), now);
        }
    }

    /// Requests that were accepted and have no answer yet, as (queued, in flight).
    pub(crate) fn pending(&self) -> (usize, usize) {
        let batches = self.lanes.iter().flat_map(|lane| &lane.in_flight);
        (self.queue.len(), batches.map(|batch| batch.requests.len()).sum())
    }

    pub(crate) fn attach(&mut self, lane: Lane) {
        self.lanes.push(lane);
    }

    pub(crate) fn lane_mut(&mut self, worker: WorkerId) -> Option<&mut Lane> {
        self.lanes.iter_mut().find(|lane| lane.worker == worker)
    }
}

/// Turns a request away that was accepted, and is too late now.
fn reject(stats: &mut Stats, request: Waiting, failure: Failure, now: Moment) {
    note::refused(request.item.journal.as_ref(), Refusal::Late);
    if request.item.claim.take() {
        stats.rejected(Refusal::Late, now.since(request.arrived), now);
    }
    reply(request, Err(failure));
}

/// Answers a request. A client that went away is no matter.
pub(crate) fn reply(request: Waiting, outcome: Result<Vec<Output>, Failure>) {
    drop(request.item.reply.send(outcome));
}
