//! A lane: what is known of the way to one worker, and what is on it.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use shadowslice_shared::groups::Groups;
use shadowslice_shared::units::{Moment, Sms};

use super::batcher;
use super::queue::Entry;
use crate::latency::Predictor;
use shadowslice_shared::ids::WorkerId;

/// A batch that executes for longer than so many times its prediction is stalled, which is no sign
/// of load.
const STALLED_FACTOR: u32 = 5;

/// Below this no batch counts as stalled.
const MIN_STALLED: Duration = Duration::from_millis(100);

/// What a lane is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Duty {
    /// Nothing is sent to the worker, but batches could be at once.
    Idle,
    /// Batches go to it.
    Serving,
    /// The worker finishes what it has; then the driver is told.
    Draining,
}

/// A batch that a worker has.
#[derive(Debug)]
pub struct InFlight<K, T> {
    /// Its name, which no other batch of the model has.
    pub id: u64,
    /// The slot that it takes.
    pub slot: u8,
    /// Its rows.
    pub rows: u32,
    /// The partition on which it runs.
    pub groups: Groups,
    /// When it was sent.
    pub sent: Moment,
    /// When it was sent, if nothing was before it then, or when it came to the front.
    pub executing_since: Option<Moment>,
    /// Empty once the requests were taken away to be served elsewhere.
    pub requests: Vec<Entry<K, T>>,
}

/// The part of a GPU on which a lane's batches run.
#[derive(Debug, Clone, PartialEq)]
pub struct Slice {
    /// Its groups of SMs; the whole, where it is all that the worker's process has.
    pub groups: Groups,
    /// Its SMs.
    pub sms: Sms,
    /// How long batches of so many rows took there when they were tried; empty where that is not
    /// known.
    pub times: Vec<(u32, Duration)>,
}

/// The way to one worker.
#[derive(Debug)]
pub struct Lane<K, T> {
    /// That worker.
    pub worker: WorkerId,
    pub(super) duty: Duty,
    /// Where its next batch runs.
    pub(super) groups: Groups,
    sms: Sms,
    /// What the lane's batches should take there: every share has times of its own.
    pub predictor: Predictor,
    /// Predictors of partitions that the lane was on before, by their SMs.
    learnt: BTreeMap<Sms, Predictor>,
    /// The predictor before anything was seen.
    blank: Predictor,
    /// Whether the worker has answered a batch since batches were routed to it.
    pub(super) answered: bool,
    pub(super) in_flight: VecDeque<InFlight<K, T>>,
    slots: u8,
    free_slots: Vec<u8>,
}

impl<K, T> Lane<K, T> {
    /// For a worker that takes `slots` batches at a time; `blank` predicts their times before
    /// anything was seen.
    pub fn new(worker: WorkerId, slice: &Slice, blank: Predictor, slots: u8) -> Self {
        Self {
            worker,
            duty: Duty::Idle,
            groups: slice.groups,
            sms: slice.sms,
            predictor: expecting(&blank, slice),
            learnt: BTreeMap::new(),
            blank,
            answered: false,
            in_flight: VecDeque::with_capacity(usize::from(slots)),
            slots,
            free_slots: (0..slots).rev().collect(),
        }
    }

    /// The next batch runs on this part of the GPU. What is known of one part holds for any part
    /// with as many SMs.
    pub(super) fn move_to(&mut self, slice: &Slice) {
        let expecting = || expecting(&self.blank, slice);
        if slice.sms != self.sms {
            let predictor = self.learnt.remove(&slice.sms).unwrap_or_else(expecting);
            let before = std::mem::replace(&mut self.predictor, predictor);
            self.learnt.insert(self.sms, before);
        }
        (self.groups, self.sms, self.answered) = (slice.groups, slice.sms, false);
    }

    /// The slot that its next batch takes.
    pub(super) fn next_slot(&self) -> Option<u8> {
        self.free_slots.last().copied()
    }

    pub(super) fn take_slot(&mut self, slot: u8) {
        self.free_slots.retain(|&free| free != slot);
    }

    pub(super) fn recycle(&mut self, slot: u8) {
        self.free_slots.push(slot);
    }

    /// Whether nothing is on the lane, answers that are still being copied included.
    pub fn is_empty(&self) -> bool {
        self.free_slots.len() == usize::from(self.slots)
    }

    /// Whether its worker has nothing to execute; answers may still be being copied.
    pub fn executes_nothing(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// The batches that its worker has, the one that executes first.
    pub fn in_flight(&self) -> impl Iterator<Item = &InFlight<K, T>> {
        self.in_flight.iter()
    }

    /// How long a batch of so many rows should take, as far as is known.
    pub(super) fn time(&self, rows: u32) -> Duration {
        self.predictor.predict(rows).unwrap_or(Duration::ZERO)
    }

    /// Takes out of a batch the requests that had better be sent after the rest of it.
    pub(super) fn part(&self, batch: &mut Vec<Entry<K, T>>) -> Vec<Entry<K, T>> {
        let rows = batch.iter().map(|request| request.rows).sum();
        let mut left = batcher::first_part(rows, &self.predictor);
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

    /// When the worker should be through with what it has; not in the past.
    pub(super) fn free_at(&self, now: Moment) -> Moment {
        let mut batches = self.in_flight.iter();
        let Some(front) = batches.next() else { return now };
        let ends = front.executing_since.unwrap_or(now) + self.time(front.rows);
        batches.fold(ends.max(now), |free, batch| free + self.time(batch.rows))
    }

    /// Whether its worker executes for so long that something is wrong with it, though it does not count
    /// as hung yet.
    pub(super) fn is_stalled(&self, now: Moment) -> bool {
        let Some(front) = self.in_flight.front() else { return false };
        // A batch in front without a beginning was reported as hung.
        let Some(since) = front.executing_since else { return true };
        let spent = now.since(since);
        spent > MIN_STALLED && spent > self.time(front.rows).saturating_mul(STALLED_FACTOR)
    }

    /// Takes the batch of that id off the lane; its slot stays taken.
    pub(super) fn take(&mut self, id: u64, now: Moment) -> Option<InFlight<K, T>> {
        let index = self.in_flight.iter().position(|batch| batch.id == id)?;
        let batch = self.in_flight.remove(index)?;
        if let Some(front) = self.in_flight.front_mut() {
            front.executing_since.get_or_insert(now);
        }
        Some(batch)
    }

    /// Takes the requests away, those of the batch that executes apart from those behind it. The
    /// batches stay, and their answers are ignored.
    pub(super) fn abandon(&mut self) -> Abandoned<K, T> {
        let mut batches = self.in_flight.iter_mut().map(|batch| std::mem::take(&mut batch.requests));
        let executing = batches.next().unwrap_or_default();
        Abandoned { executing, behind: batches.flatten().collect() }
    }
}

/// Requests that were taken away from a worker.
#[derive(Debug)]
pub struct Abandoned<K, T> {
    /// The requests of the batch that it executed.
    pub executing: Vec<Entry<K, T>>,
    /// The requests of the batches behind that one.
    pub behind: Vec<Entry<K, T>>,
}

/// Predicts a model's batches on a part of the GPU, from what was measured there, if it was.
fn expecting(blank: &Predictor, slice: &Slice) -> Predictor {
    let mut predictor = blank.on(slice.sms);
    for &(rows, took) in &slice.times {
        predictor.expect(rows, took);
    }
    predictor
}
