//! A lane: the state of the path to one worker, and the batches on it.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use shadowslice_shared::groups::Groups;
use shadowslice_shared::units::{Sms, Timestamp};

use super::batcher::{self, BatchLimits};
use super::messages::Ticket;
use super::queue::{QueuedRequest, SUSPECT_LEVEL};
use crate::latency::Predictor;
use shadowslice_shared::ids::WorkerId;

/// The multiple of its predicted time after which a batch has stalled. The load does not cause a
/// stall.
const STALLED_FACTOR: u32 = 5;

/// The shortest time after which a batch has stalled.
const MIN_STALLED: Duration = Duration::from_millis(100);

/// The state of a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Duty {
    /// The lane gets no batches.
    Idle,
    /// The lane gets all new batches.
    Serving,
    /// The worker finishes its batches; then the driver gets a report.
    Draining,
}

/// A batch that was sent and not answered.
#[derive(Debug)]
pub struct BatchInFlight<K, T> {
    /// The batch's number, unique among the model's batches.
    pub id: u64,
    /// The slot of the worker's response slab.
    pub slot: u8,
    /// The number of rows.
    pub rows: u32,
    /// True for a step of a stream instead of a batch.
    pub step: bool,
    /// The groups of SMs on which the batch executes.
    pub groups: Groups,
    /// The time at which the batch was sent.
    pub sent: Timestamp,
    /// The time at which the batch began to execute: when it was sent to an idle lane, or came to
    /// the front.
    pub executing_since: Option<Timestamp>,
    /// The requests; empty once they were taken away to be served elsewhere.
    pub requests: Vec<QueuedRequest<K, T>>,
}

/// The SMs on which a lane's batches run.
#[derive(Debug, Clone, PartialEq)]
pub struct Slice {
    /// The groups of SMs; the whole GPU if the share is not a partition inside the worker.
    pub groups: Groups,
    /// The number of SMs.
    pub sms: Sms,
    /// The times of batches that the worker measured before it served, by rows; empty if unknown.
    pub times: Vec<(u32, Duration)>,
    /// The most rows of a batch that fits on these SMs; `None` if all sizes fit. A request with
    /// more rows runs on the whole GPU.
    pub max_rows: Option<u32>,
}

/// The path to one worker, with the batches that were sent there.
#[derive(Debug)]
pub struct Lane<K, T> {
    /// The worker.
    pub worker: WorkerId,
    pub(super) duty: Duty,
    pub(super) groups: Groups,
    sms: Sms,
    max_rows: Option<u32>,
    /// The predictor for the lane's present SMs.
    pub predictor: Predictor,
    /// The predictors of the SMs that the lane used before.
    learnt: BTreeMap<Sms, Predictor>,
    /// A predictor without observations.
    blank: Predictor,
    /// True if the worker answered a batch since traffic moved here.
    pub(super) answered: bool,
    pub(super) in_flight: VecDeque<BatchInFlight<K, T>>,
    slots: u8,
    free_slots: Vec<u8>,
    pub(super) streams: Streams<K, T>,
}

/// The open streams of a worker.
#[derive(Debug)]
pub(super) struct Streams<K, T> {
    /// The number of open streams, including those whose client is still reading the last answer.
    pub(super) open: u32,
    /// The requests for further answers.
    pub(super) steps: VecDeque<QueuedRequest<K, T>>,
    /// True if the worker can give no further answer.
    pub(super) cut: bool,
}

impl<K, T> Lane<K, T> {
    /// Creates an idle lane. The worker takes `slots` batches at a time.
    pub fn new(worker: WorkerId, slice: &Slice, blank: Predictor, slots: u8) -> Self {
        Self {
            worker,
            duty: Duty::Idle,
            groups: slice.groups,
            sms: slice.sms,
            max_rows: slice.max_rows,
            predictor: expecting(&blank, slice),
            learnt: BTreeMap::new(),
            blank,
            answered: false,
            in_flight: VecDeque::with_capacity(usize::from(slots)),
            slots,
            free_slots: (0..slots).rev().collect(),
            streams: Streams { open: 0, steps: VecDeque::new(), cut: false },
        }
    }

    /// Moves to other SMs, from the next batch on. The times of one partition apply to each
    /// partition with as many SMs.
    pub(super) fn move_to(&mut self, slice: &Slice) {
        let expecting = || expecting(&self.blank, slice);
        if slice.sms != self.sms {
            let predictor = self.learnt.remove(&slice.sms).unwrap_or_else(expecting);
            let before = std::mem::replace(&mut self.predictor, predictor);
            self.learnt.insert(self.sms, before);
        }
        (self.groups, self.sms, self.answered) = (slice.groups, slice.sms, false);
        self.max_rows = slice.max_rows;
    }

    /// Returns the limits of a batch on this lane, within those of the model.
    pub(super) fn limits(&self, model: BatchLimits) -> BatchLimits {
        let max_rows = self.max_rows.map_or(model.max_rows, |most| model.max_rows.min(most));
        BatchLimits { max_rows, ..model }
    }

    pub(super) fn next_slot(&self) -> Option<u8> {
        self.free_slots.last().copied()
    }

    pub(super) fn take_slot(&mut self, slot: u8) {
        self.free_slots.retain(|&free| free != slot);
    }

    pub(super) fn recycle(&mut self, slot: u8) {
        self.free_slots.push(slot);
    }

    /// Returns true if all slots are free and no stream is open. Answers that are still being
    /// copied occupy their slots.
    pub fn is_empty(&self) -> bool {
        self.free_slots.len() == usize::from(self.slots) && (self.streams.open == 0 || self.streams.cut)
    }

    /// Returns true once when a draining lane is empty.
    pub(super) fn ends_draining(&mut self) -> bool {
        let drained = self.duty == Duty::Draining && self.is_empty();
        if drained {
            self.duty = Duty::Idle;
        }
        drained
    }

    /// Returns true if no batch executes. Answers may still be being copied.
    pub fn is_idle(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// Returns the batches on the lane; the executing one is first.
    pub fn in_flight(&self) -> impl Iterator<Item = &BatchInFlight<K, T>> {
        self.in_flight.iter()
    }

    /// Returns true if the lane may open another stream, with at most `max` at a time.
    pub(super) fn has_room(&self, max: Option<u32>) -> bool {
        let begin = self.in_flight.iter().filter(|batch| !batch.step).count();
        max.is_none_or(|max| self.streams.open as usize + begin < max as usize)
    }

    /// Returns true if the lane retries a request whose batch died with its worker. A batch behind
    /// it would wait as long and might die with it.
    pub(super) fn tries_suspect(&self) -> bool {
        let mut first = self.in_flight.iter().filter_map(|batch| batch.requests.first());
        first.any(|request| request.level == SUSPECT_LEVEL)
    }

    /// Returns a free slot and the step to send in it.
    pub(super) fn next_step(&mut self) -> Option<(u8, QueuedRequest<K, T>)>
    where
        T: Ticket,
    {
        let slot = self.next_slot()?;
        self.streams.steps.retain(|step| !step.item.is_settled());
        Some((slot, self.streams.steps.pop_front()?))
    }

    pub(super) fn time(&self, rows: u32) -> Duration {
        self.predictor.predict(rows).unwrap_or(Duration::ZERO)
    }

    /// Removes from a batch the requests that should be sent after the others.
    pub(super) fn split_off_rest(&self, batch: &mut Vec<QueuedRequest<K, T>>) -> Vec<QueuedRequest<K, T>> {
        let rows = batch.iter().map(|request| request.rows).sum();
        let mut left = batcher::rows_sent_first(rows, &self.predictor);
        if left == rows {
            return Vec::new();
        }
        let first = batch.iter().take_while(|request| {
            let fits = request.rows <= left;
            left = left.saturating_sub(request.rows);
            fits
        });
        let first = first.count();
        if first == 0 { Vec::new() } else { batch.split_off(first) }
    }

    /// Returns the time at which the worker should have finished its batches; not in the past.
    /// Steps of streams count as zero: they are short, and new streams should not wait for them.
    pub(super) fn free_at(&self, now: Timestamp) -> Timestamp {
        let time = |batch: &BatchInFlight<K, T>| match batch.step {
            true => Duration::ZERO,
            false => self.time(batch.rows),
        };
        let mut batches = self.in_flight.iter();
        let Some(front) = batches.next() else { return now };
        let ends = front.executing_since.unwrap_or(now) + time(front);
        batches.fold(ends.max(now), |free, batch| free + time(batch))
    }

    /// Returns true if the worker takes much longer than predicted, but does not count as hung yet.
    pub fn is_stalled(&self, now: Timestamp) -> bool {
        let Some(front) = self.in_flight.front() else { return false };
        // A first batch without a start was reported as hung.
        let Some(since) = front.executing_since else { return true };
        if front.step {
            // The time of a step cannot be predicted.
            return false;
        }
        let spent = now.since(since);
        spent > MIN_STALLED && spent > self.time(front.rows).saturating_mul(STALLED_FACTOR)
    }

    /// Takes a batch off the lane; its slot stays occupied.
    pub(super) fn take_batch(&mut self, id: u64, now: Timestamp) -> Option<BatchInFlight<K, T>> {
        let index = self.in_flight.iter().position(|batch| batch.id == id)?;
        let batch = self.in_flight.remove(index)?;
        if let Some(front) = self.in_flight.front_mut() {
            front.executing_since.get_or_insert(now);
        }
        Some(batch)
    }

    /// Takes all requests. The batches stay on the lane, their answers are ignored, and streams
    /// end.
    pub(super) fn abandon(&mut self) -> AbandonedRequests<K, T> {
        self.streams.cut = true;
        let mut batches = self.in_flight.iter_mut().map(|batch| std::mem::take(&mut batch.requests));
        let executing = batches.next().unwrap_or_default();
        AbandonedRequests {
            executing,
            behind: batches.flatten().chain(self.streams.steps.drain(..)).collect(),
        }
    }
}

/// The requests that were taken from a lane.
#[derive(Debug)]
pub struct AbandonedRequests<K, T> {
    /// The requests of the batch that executed.
    pub executing: Vec<QueuedRequest<K, T>>,
    /// The requests of the batches behind it, and the steps of streams.
    pub behind: Vec<QueuedRequest<K, T>>,
}

/// Returns a predictor for a slice, with the times that the worker measured.
fn expecting(blank: &Predictor, slice: &Slice) -> Predictor {
    let mut predictor = blank.on(slice.sms);
    for &(rows, took) in &slice.times {
        predictor.expect(rows, took);
    }
    predictor
}
