//! One model: its queue, its two lanes, and what they have in flight. It does what the supervisor's
//! pipeline does, with the same queue, batcher and door.

use std::collections::VecDeque;
use std::time::Duration;

use shadowslice_policy::batcher::{self, Limits, Next, Taken};
use shadowslice_policy::door::{self, Ahead};
use shadowslice_policy::late::Lateness;
use shadowslice_policy::latency::Predictor;
use shadowslice_policy::punctual::Punctual;
use shadowslice_policy::queue::{Entry, Queue};
use shadowslice_policy::sharing::{Door, Live};
use shadowslice_shared::batch::{IN_FLIGHT, MAX_REQUESTS};
use shadowslice_shared::contention::Occupant;
use shadowslice_shared::units::{Moment, Sms};

use super::handover::Other;
use super::observe::Observer;
use super::partitions::Inside;
use super::{Stage, Timer, timer};
use crate::scenario::Served;
use crate::time::{NEVER, at_ns, moment, ns};

type Request = Entry<(), ()>;

/// A batch on its way.
#[derive(Debug)]
struct Batch {
    /// When it came to the front; the world's own idea of it for those behind.
    front_since: u64,
    requests: Vec<Request>,
}

impl Batch {
    fn rows(&self) -> u32 {
        u32::try_from(self.requests.len()).unwrap_or(u32::MAX)
    }
}

/// A way to one worker.
#[derive(Debug)]
pub(super) struct Lane {
    pub(super) seat: usize,
    pub(super) sms: Sms,
    in_flight: VecDeque<Batch>,
}

impl Lane {
    pub(super) fn is_empty(&self) -> bool {
        self.in_flight.is_empty()
    }
}

#[derive(Debug)]
pub(super) struct Model<'a> {
    pub(super) served: &'a Served,
    pub(super) index: usize,
    slo_ns: u64,
    queue: Queue<(), ()>,
    limits: Limits,
    door: Door,
    lateness: Option<Lateness>,
    pub(super) predictor: Predictor,
    pub(super) observer: Observer,
    /// The one that serves, and the one that did or is about to.
    pub(super) lanes: [Lane; 2],
    pub(super) serving: usize,
    pub(super) other: Other,
    /// Where its share changes inside its worker.
    pub(super) inside: Option<Inside>,
    pub(super) since: u64,
    pub(super) repartitions: Vec<u64>,
    alarm: u64,
}

impl<'a> Model<'a> {
    pub(super) fn new(served: &'a Served, index: usize, stage: &mut Stage<'a>) -> Self {
        let terms = &served.terms;
        let sms = terms.initial;
        let lane = |which: Timer| {
            let granted = Occupant::anywhere(sms);
            let seat = stage.gpus.add_seat(terms.gpu, &served.truth, granted, timer(index, which));
            Lane { seat, sms, in_flight: VecDeque::with_capacity(IN_FLIGHT) }
        };
        let max_rows = terms.max_batch.max(1);
        Self {
            served,
            index,
            slo_ns: ns(terms.slo),
            queue: Queue::new(served.max_queued),
            limits: Limits { max_rows, max_requests: MAX_REQUESTS, max_delay: served.max_delay },
            door: Door::open(max_rows),
            lateness: (!served.serve_late).then(|| Lateness::new(terms.slo)),
            predictor: Predictor::new(terms.profile.as_ref(), sms),
            observer: Observer::new(),
            lanes: [Timer::FirstLane, Timer::SecondLane].map(lane),
            serving: 0,
            other: Other::Gone,
            inside: Inside::of(stage.gpus.gpu(terms.gpu), sms).filter(|_| served.in_process),
            since: 0,
            repartitions: Vec::new(),
            alarm: NEVER,
        }
    }

    /// A request comes.
    pub(super) fn arrive(&mut self, now: u64, stage: &mut Stage<'_>) {
        let arrived = moment(now);
        self.observer.arrived();
        let deadline = arrived + self.served.terms.slo;
        // A request that finds no other before it is tried in any case, or predictions would never be corrected.
        let tried = self.queue.is_empty() && self.lanes[self.serving].is_empty();
        let late = !tried && self.refuses_late() && self.answered_at(arrived) > deadline;
        let request = Entry { shape: (), rows: 1, arrived, deadline, alone: false, item: () };
        if late || self.queue.push(request).is_err() {
            self.observer.refused(1);
        } else {
            self.dispatch(now, stage);
        }
    }

    fn refuses_late(&self) -> bool {
        self.door.refuse_late && !self.served.serve_late
    }

    /// How long a batch should take, as far as is known.
    fn time(&self, rows: u32) -> Duration {
        self.predictor.predict(rows).unwrap_or(Duration::ZERO)
    }

    /// When a request that comes now should be answered.
    fn answered_at(&self, now: Moment) -> Moment {
        let ahead = Ahead {
            lane_free: self.lane_free(now),
            rows: self.queue.len() as u64,
            max_batch: self.limits.max_rows,
        };
        ahead.answered_at(|rows| self.time(rows))
    }

    /// When the serving lane should be through with what it has.
    fn lane_free(&self, now: Moment) -> Moment {
        let mut batches = self.lanes[self.serving].in_flight.iter();
        let Some(front) = batches.next() else { return now };
        let front_ends = moment(front.front_since) + self.time(front.rows());
        let behind: Duration = batches.map(|batch| self.time(batch.rows())).sum();
        front_ends.max(now) + behind
    }

    /// Sends all that can be sent.
    pub(super) fn dispatch(&mut self, now: u64, stage: &mut Stage<'_>) {
        let mut alarm = NEVER;
        while !self.queue.is_empty() && self.lanes[self.serving].in_flight.len() < IN_FLIGHT {
            if !self.lanes[self.serving].is_empty() {
                let send_at = door::send_at(self.lane_free(moment(now)));
                if send_at > moment(now) {
                    alarm = at_ns(send_at);
                    break;
                }
            }
            let starts = self.lane_free(moment(now));
            let idle = self.lanes[self.serving].is_empty();
            let refuses = self.refuses_late();
            let forgiven = Moment::default();
            let punctual = Punctual { starts, idle, forgiven, predictor: &self.predictor };
            match batcher::next(&mut self.queue, &self.limits, refuses.then_some(&punctual), moment(now)) {
                Next::Run(taken) => self.send(taken, now, stage),
                Next::WaitUntil(until) => {
                    alarm = at_ns(until);
                    break;
                }
                Next::Idle => break,
            }
        }
        if let Some(lateness) = &mut self.lateness {
            if self.queue.is_empty() { lateness.emptied() } else { lateness.queued(moment(now)) }
        }
        if alarm != self.alarm {
            self.alarm = alarm;
            stage.timers.set(timer(self.index, Timer::Alarm), alarm);
        }
    }

    /// Sends one batch, less the requests that come too late.
    fn send(&mut self, taken: Taken<(), ()>, now: u64, stage: &mut Stage<'_>) {
        let Taken { batch: mut requests, late } = taken;
        let there = requests.len();
        if let Some(lateness) = self.lateness.as_ref().filter(|_| !self.refuses_late()) {
            requests.retain(|request| !lateness.refuses(request.deadline, moment(now)));
        }
        let late = late.len() + there - requests.len();
        self.observer.refused(late);
        if requests.is_empty() {
            return;
        }
        let serving = self.serving;
        self.lanes[serving].in_flight.push_back(Batch { front_since: now, requests });
        if self.lanes[serving].in_flight.len() == 1 {
            self.observer.started(now);
            self.execute(serving, now, stage);
        }
    }

    /// The front batch of a lane starts.
    fn execute(&mut self, lane: usize, now: u64, stage: &mut Stage<'_>) {
        let Lane { seat, in_flight, .. } = &mut self.lanes[lane];
        let Some(batch) = in_flight.front_mut() else { return };
        batch.front_since = now;
        let noise = stage.noise();
        stage.gpus.start(*seat, batch.rows(), noise, now, &mut stage.timers);
    }

    /// The front batch of a lane is through.
    pub(super) fn completed(&mut self, lane: usize, now: u64, stage: &mut Stage<'_>) {
        let seat = self.lanes[lane].seat;
        let took = stage.gpus.finish(seat, now, &mut stage.timers);
        let Some(batch) = self.lanes[lane].in_flight.pop_front() else { return };
        if self.lanes[lane].is_empty() {
            stage.gpus.leave(seat, now, &mut stage.timers);
            self.observer.stopped(now);
        } else {
            self.execute(lane, now, stage);
        }
        for request in &batch.requests {
            self.observer.answered(now - at_ns(request.arrived), self.slo_ns);
        }
        if lane == self.serving {
            self.observer.executed(batch.rows(), took);
            self.predictor.observe(batch.rows(), took);
            self.dispatch(now, stage);
        } else if self.lanes[lane].is_empty() {
            self.drained(now, stage);
        }
    }

    /// The policy opens or narrows the door.
    pub(super) fn set_door(&mut self, door: Door, now: u64, stage: &mut Stage<'_>) {
        let max_batch = door.max_batch.clamp(1, self.served.terms.max_batch.max(1));
        self.door = Door { max_batch, ..door };
        self.limits.max_rows = max_batch;
        self.dispatch(now, stage);
    }

    /// The model as its policy sees it.
    pub(super) fn live(&self, now: u64) -> Live {
        Live {
            share: self.share(),
            since: moment(self.since),
            coming: self.coming(),
            standing: self.standing(),
            held: false,
            seen: self.observer.seen(self.queue.len(), now),
        }
    }

    /// Accepted requests without an answer.
    pub(super) fn pending(&self) -> u64 {
        let batches = self.lanes.iter().flat_map(|lane| &lane.in_flight);
        (self.queue.len() + batches.map(|batch| batch.requests.len()).sum::<usize>()) as u64
    }
}
