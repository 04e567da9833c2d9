//! A lane: what is known of the way to one worker, and what is on it.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use shadowslice_shared::groups::Groups;
use shadowslice_shared::units::{Sms, Timestamp};

use super::batcher::{self, BatchLimits};
use super::messages::Ticket;
use super::queue::{QueuedRequest, SUSPECT_LEVEL};
use crate::latency::Predictor;
use shadowslice_shared::ids::WorkerId;

/// A batch that takes so many times its prediction is stalled, which is no sign of load.
const STALLED_FACTOR: u32 = 5;

const MIN_STALLED: Duration = Duration::from_millis(100);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Duty {
    Idle,
    Serving,
    /// The worker finishes what it has; then the driver is told.
    Draining,
}

#[derive(Debug)]
pub struct BatchInFlight<K, T> {
    /// Unique among the model's batches.
    pub id: u64,
    pub slot: u8,
    pub rows: u32,
    /// It is not a batch, but a step of a stream.
    pub step: bool,
    pub groups: Groups,
    pub sent: Timestamp,
    /// When it was sent, if nothing was before it then, or when it came to the front.
    pub executing_since: Option<Timestamp>,
    /// Empty once the requests were taken away to be served elsewhere.
    pub requests: Vec<QueuedRequest<K, T>>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Slice {
    /// The whole, where it is all that the worker's process has.
    pub groups: Groups,
    pub sms: Sms,
    /// From trials, by rows; empty where they are not known.
    pub times: Vec<(u32, Duration)>,
    /// The most rows of a batch that fits on these SMs; `None` if all sizes do. A request with more
    /// rows runs on the whole GPU.
    pub max_rows: Option<u32>,
}

#[derive(Debug)]
pub struct Lane<K, T> {
    pub worker: WorkerId,
    pub(super) duty: Duty,
    pub(super) groups: Groups,
    sms: Sms,
    max_rows: Option<u32>,
    /// Of the present share: every share has times of its own.
    pub predictor: Predictor,
    /// Of partitions that the lane was on before, by their SMs.
    learnt: BTreeMap<Sms, Predictor>,
    blank: Predictor,
    /// Since batches were routed to the worker.
    pub(super) answered: bool,
    pub(super) in_flight: VecDeque<BatchInFlight<K, T>>,
    slots: u8,
    free_slots: Vec<u8>,
    pub(super) streams: Streams<K, T>,
}

/// The streams whose worker this is.
#[derive(Debug)]
pub(super) struct Streams<K, T> {
    /// Those that have begun and not ended, be it that their clients still take the last answer.
    pub(super) open: u32,
    /// Those that want their next answer now.
    pub(super) steps: VecDeque<QueuedRequest<K, T>>,
    /// No further answer can be had.
    pub(super) cut: bool,
}

impl<K, T> Lane<K, T> {
    /// The worker takes `slots` batches at a time.
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

    /// For the next batch. What is known of one part of the GPU holds for any part with as many
    /// SMs.
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

    /// Answers that are still being copied count, too, and streams that have not ended.
    pub fn is_empty(&self) -> bool {
        self.free_slots.len() == usize::from(self.slots) && (self.streams.open == 0 || self.streams.cut)
    }

    /// Whether it has been told to drain and has nothing left, which is said once.
    pub(super) fn ends_draining(&mut self) -> bool {
        let drained = self.duty == Duty::Draining && self.is_empty();
        if drained {
            self.duty = Duty::Idle;
        }
        drained
    }

    /// Answers may still be being copied.
    pub fn is_idle(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// The batch that executes comes first.
    pub fn in_flight(&self) -> impl Iterator<Item = &BatchInFlight<K, T>> {
        self.in_flight.iter()
    }

    /// Whether it may begin another stream, if it has at most so many at a time.
    pub(super) fn has_room(&self, most: Option<u32>) -> bool {
        let begin = self.in_flight.iter().filter(|batch| !batch.step).count();
        most.is_none_or(|most| self.streams.open as usize + begin < most as usize)
    }

    /// Returns whether it tries a request again whose batch died with its worker. What is sent behind
    /// that waits as long, and may die with it.
    pub(super) fn tries_suspect(&self) -> bool {
        let mut first = self.in_flight.iter().filter_map(|batch| batch.requests.first());
        first.any(|request| request.level == SUSPECT_LEVEL)
    }

    /// A slot, and the step that is sent in it.
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

    /// Takes out of a batch the requests that had better be sent after the rest of it.
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

    /// When the worker should be through with what it has; not in the past. Steps of streams count
    /// for nothing: they are short, and a stream that begins must not stand back for them.
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

    /// Whether something is wrong with the worker, though it does not count as hung yet.
    pub fn is_stalled(&self, now: Timestamp) -> bool {
        let Some(front) = self.in_flight.front() else { return false };
        // A batch in front without a beginning was reported as hung.
        let Some(since) = front.executing_since else { return true };
        if front.step {
            // Nothing is known of how long it may take.
            return false;
        }
        let spent = now.since(since);
        spent > MIN_STALLED && spent > self.time(front.rows).saturating_mul(STALLED_FACTOR)
    }

    /// Takes a batch off the lane; its slot stays taken.
    pub(super) fn take_batch(&mut self, id: u64, now: Timestamp) -> Option<BatchInFlight<K, T>> {
        let index = self.in_flight.iter().position(|batch| batch.id == id)?;
        let batch = self.in_flight.remove(index)?;
        if let Some(front) = self.in_flight.front_mut() {
            front.executing_since.get_or_insert(now);
        }
        Some(batch)
    }

    /// The batches stay, and their answers are ignored. Streams end.
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

#[derive(Debug)]
pub struct AbandonedRequests<K, T> {
    pub executing: Vec<QueuedRequest<K, T>>,
    pub behind: Vec<QueuedRequest<K, T>>,
}

fn expecting(blank: &Predictor, slice: &Slice) -> Predictor {
    let mut predictor = blank.on(slice.sms);
    for &(rows, took) in &slice.times {
        predictor.expect(rows, took);
    }
    predictor
}
