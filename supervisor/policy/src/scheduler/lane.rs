//! A lane: the path over which a scheduler sends batches to one worker. It contains the batches that
//! were sent and have no answer yet.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use shadowslice_shared::groups::Groups;
use shadowslice_shared::units::{Sms, Timestamp};

use super::batcher::{self, BatchLimits};
use super::messages::Ticket;
use super::queue::{QueuedRequest, SUSPECT_LEVEL};
use super::streams::LaneStreams;
use crate::latency::Predictor;
use crate::pauses::RunningBatch;
use crate::tenants::{TenantSet, TenantTurns};
use shadowslice_shared::ids::WorkerId;

/// The multiple of a batch's predicted time after which the lane counts as stalled. A high load alone
/// does not prolong a batch this much.
const STALLED_FACTOR: u32 = 5;

/// The minimum time after which a lane counts as stalled.
const MIN_STALLED: Duration = Duration::from_millis(100);

/// The assumed time of a batch without a prediction.
const UNKNOWN_BATCH: Duration = Duration::from_millis(1);

/// The role of a lane in the scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Duty {
    /// The lane gets no new batches.
    Idle,
    /// The lane gets all new batches.
    Serving,
    /// The lane gets no new batches, and its worker finishes the batches that it has. The scheduler
    /// then reports that the lane is empty.
    Draining,
}

/// A batch that was sent to a worker and has no answer yet.
#[derive(Debug)]
pub struct BatchInFlight<K, T> {
    /// The id of the batch, unique among the model's batches.
    pub id: u64,
    /// The slot of the worker's response slab in which the answer arrives.
    pub slot: u8,
    /// The number of rows.
    pub rows: u32,
    /// True if this is a step of a stream instead of a batch.
    pub step: bool,
    /// The groups of SMs on which the batch executes.
    pub groups: Groups,
    /// The time at which the batch was sent.
    pub sent: Timestamp,
    /// The time at which the batch started to execute. For an idle lane, this is the time at which the
    /// batch was sent. Otherwise, it is the time at which the previous batch ended.
    pub executing_since: Option<Timestamp>,
    /// The requests of the batch. The list is empty after `abandon` has taken the requests off the
    /// lane, so that another worker can run them.
    pub requests: Vec<QueuedRequest<K, T>>,
}

/// The SMs on which a lane's batches run.
#[derive(Debug, Clone, PartialEq)]
pub struct Slice {
    /// The groups of SMs, or the whole GPU if the share is not a partition inside the worker.
    pub groups: Groups,
    /// The number of SMs.
    pub sms: Sms,
    /// The times of batches by number of rows, which the worker measured before it served. The list is
    /// empty if the times are unknown.
    pub times: Vec<(u32, Duration)>,
    /// The maximum number of rows in a batch on these SMs, or `None` if all batch sizes fit. A request
    /// with more rows runs on the whole GPU.
    pub max_rows: Option<u32>,
}

/// The state of the weights of a lane's worker on the GPU, which decides when batches can execute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LaneWeights {
    /// Batches execute at once.
    Loaded,
    /// The worker accepts no batches. From the order to wake, it takes this time until they execute.
    Released(Duration),
    /// The worker accepts batches, and executes them from about this time.
    Loading(Timestamp),
}

/// The path to one worker, with the batches that were sent to it.
#[derive(Debug)]
pub struct Lane<K, T> {
    /// The worker that executes the batches.
    pub worker: WorkerId,
    pub(super) duty: Duty,
    pub(super) weights: LaneWeights,
    pub(super) groups: Groups,
    sms: Sms,
    max_rows: Option<u32>,
    /// The predictor for the SMs that the lane uses now.
    pub predictor: Predictor,
    /// The predictor for batches that no other model slows down. It has only the times that the worker
    /// measured before it served, or those of the profile.
    alone: Predictor,
    /// The predictors for SMs that the lane used earlier.
    learnt: BTreeMap<Sms, Predictor>,
    /// A predictor without observations. The lane copies it for SMs that it has not used yet.
    blank: Predictor,
    /// True if the worker has answered a batch since it took the traffic over or moved to other SMs.
    pub(super) answered: bool,
    pub(super) in_flight: VecDeque<BatchInFlight<K, T>>,
    slots: u8,
    free_slots: Vec<u8>,
    pub(super) streams: LaneStreams<K, T>,
}

impl<K, T> Lane<K, T> {
    /// Creates an idle lane. The worker accepts up to `slots` batches at a time.
    pub fn new(worker: WorkerId, slice: &Slice, blank: Predictor, slots: u8) -> Self {
        Self {
            worker,
            duty: Duty::Idle,
            weights: LaneWeights::Loaded,
            groups: slice.groups,
            sms: slice.sms,
            max_rows: slice.max_rows,
            predictor: expecting(&blank, slice),
            alone: expecting(&blank, slice),
            learnt: BTreeMap::new(),
            blank,
            answered: false,
            in_flight: VecDeque::with_capacity(usize::from(slots)),
            slots,
            free_slots: (0..slots).rev().collect(),
            streams: LaneStreams::default(),
        }
    }

    /// Moves the lane to other SMs, starting with the next batch. Partitions with the same number of
    /// SMs share their predictions.
    pub(super) fn move_to(&mut self, slice: &Slice) {
        let unloaded = expecting(&self.blank, slice);
        if slice.sms != self.sms {
            let predictor = self.learnt.remove(&slice.sms).unwrap_or_else(|| unloaded.clone());
            let before = std::mem::replace(&mut self.predictor, predictor);
            self.learnt.insert(self.sms, before);
            self.alone = unloaded;
        }
        (self.groups, self.sms, self.answered) = (slice.groups, slice.sms, false);
        self.max_rows = slice.max_rows;
    }

    /// Returns the batch limits of this lane, which do not exceed the model's limits.
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
        self.streams.record_recycled(slot);
        self.free_slots.push(slot);
    }

    /// Returns true if all slots are free and no stream is open. A slot stays occupied while its answer
    /// is being copied.
    pub fn is_empty(&self) -> bool {
        self.free_slots.len() == usize::from(self.slots) && (self.streams.open == 0 || self.streams.cut)
    }

    /// Returns true if the lane is draining and empty. Ends the draining in that case, so that later
    /// calls return false.
    pub(super) fn ends_draining(&mut self) -> bool {
        let drained = self.duty == Duty::Draining && self.is_empty();
        if drained {
            self.duty = Duty::Idle;
        }
        drained
    }

    /// Returns true if no batch executes, even if answers are still being copied.
    pub fn is_idle(&self) -> bool {
        self.in_flight.is_empty()
    }

    /// Returns the batches on the lane. The first batch is executing.
    pub fn in_flight(&self) -> impl Iterator<Item = &BatchInFlight<K, T>> {
        self.in_flight.iter()
    }

    /// Returns true if the lane may open another stream.
    pub(super) fn has_room(&self) -> bool {
        let begin = self.in_flight.iter().filter(|batch| !batch.step).count();
        let open = self.streams.open as usize + begin;
        self.streams.limits.is_none_or(|limits| open < limits.open as usize)
    }

    /// Returns true if the predicted time of another start leaves the other streams time for their next
    /// answer. If streams take turns, a step always follows a start.
    pub(super) fn has_time_to_start(&self, next_slo: Option<Duration>) -> bool {
        self.streams.advance_together() && self.streams.has_time_to_start(self.step_time(), next_slo)
    }

    /// Returns the predicted time of a step of all open streams.
    fn step_time(&self) -> Duration {
        self.predictor.predict(self.streams.open.max(1)).unwrap_or(Duration::ZERO)
    }

    /// Returns true if the lane is retrying a request whose worker died while it executed the request.
    /// Another batch would wait behind this request, and might be lost with the worker.
    pub(super) fn tries_suspect(&self) -> bool {
        let mut first = self.in_flight.iter().filter_map(|batch| batch.requests.first());
        first.any(|request| request.level == SUSPECT_LEVEL)
    }

    /// Returns the streams that the next step advances, and a free slot for the step. Only one step at a
    /// time advances streams together, so that the next step contains all of them again.
    pub(super) fn next_step(&mut self) -> Option<(u8, Vec<QueuedRequest<K, T>>)>
    where
        T: Ticket,
    {
        let slot = self.next_slot()?;
        if self.streams.is_stepping() {
            return None;
        }
        let steps = self.streams.take_steps();
        (!steps.is_empty()).then_some((slot, steps))
    }

    /// Returns the groups of SMs that the next batch uses.
    pub fn groups(&self) -> Groups {
        self.groups
    }

    /// Returns the tenants with requests in the batches of this lane.
    pub fn tenants(&self) -> TenantSet {
        let requests = self.in_flight.iter().flat_map(|batch| &batch.requests);
        requests.map(|request| request.tenant).collect()
    }

    /// Returns the predicted SM time of one row in a full batch of `max_rows` rows, in SM·s. Without a
    /// prediction, the time of a batch is assumed to be [`UNKNOWN_BATCH`].
    pub(super) fn row_cost(&self, max_rows: u32) -> f64 {
        let rows = max_rows.max(1);
        let batch = self.predictor.predict(rows).unwrap_or(UNKNOWN_BATCH);
        batch.as_secs_f64() * f64::from(self.sms.0) / f64::from(rows)
    }

    /// Returns the turns of the tenants after all batches in flight, with their predicted SM time.
    pub(super) fn turns_after(&self, turns: &TenantTurns) -> TenantTurns {
        let mut turns = turns.clone();
        if turns.weights.is_empty() {
            return turns;
        }
        for batch in &self.in_flight {
            let row_cost = self.row_cost(batch.rows);
            for request in &batch.requests {
                turns.add(request.tenant, f64::from(request.rows) * row_cost);
            }
        }
        turns
    }

    /// Returns the predicted time until the answer to a batch. If streams advance together, the batch only
    /// opens a stream, and its first answer comes with the next step.
    pub(super) fn time(&self, rows: u32) -> Duration {
        match self.streams.advance_together() {
            true => self.streams.start_time().saturating_add(self.step_time()),
            false => self.predictor.predict(rows).unwrap_or(Duration::ZERO),
        }
    }

    /// Removes and returns the requests of a batch that should run in a second batch.
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

    /// Returns the time at which the worker is expected to finish its batches, but not earlier than
    /// `now`. Steps of streams count as zero time. They are short, and new streams must not wait for
    /// them.
    pub(super) fn free_at(&self, now: Timestamp) -> Timestamp {
        let time = |batch: &BatchInFlight<K, T>| match batch.step {
            true => Duration::ZERO,
            false => self.time(batch.rows),
        };
        let ready = match self.weights {
            LaneWeights::Loaded => now,
            LaneWeights::Released(wake_time) => now + wake_time,
            LaneWeights::Loading(until) => until.max(now),
        };
        let mut batches = self.in_flight.iter();
        let Some(front) = batches.next() else { return ready };
        let began = front.executing_since.unwrap_or(now);
        let began = if self.weights == LaneWeights::Loaded { began } else { began.max(ready) };
        batches.fold((began + time(front)).max(now), |free, batch| free + time(batch))
    }

    /// Returns the batch that executes on the GPU, with the deadlines of all batches of the lane. Returns
    /// `None` for a step of a stream, and while the weights are not loaded.
    pub(super) fn running_batch(&self, now: Timestamp) -> Option<RunningBatch> {
        let front = self.in_flight.front().filter(|front| !front.step)?;
        if self.weights != LaneWeights::Loaded {
            return None;
        }
        let (mut end, mut slack) = (front.executing_since?, Duration::MAX);
        for batch in &self.in_flight {
            end = (end + self.time(batch.rows)).max(now);
            let deadline = batch.requests.iter().map(|request| request.deadline).min()?;
            slack = slack.min(deadline.since(end));
        }
        let deadline = front.requests.iter().map(|request| request.deadline).min()?;
        let BatchInFlight { id, groups, rows, .. } = *front;
        let time = self.alone.predict(rows).unwrap_or(Duration::MAX).min(self.time(rows));
        Some(RunningBatch { id, groups, time, free_at: end, deadline, slack })
    }

    /// Returns true if the worker has released its weights, so that it accepts no batches.
    pub fn sleeps(&self) -> bool {
        matches!(self.weights, LaneWeights::Released(_))
    }

    /// Returns true if the executing batch takes much longer than predicted. This limit is lower than
    /// the limit after which the worker counts as hung.
    pub fn is_stalled(&self, now: Timestamp) -> bool {
        let Some(front) = self.in_flight.front() else { return false };
        // If the first batch has no start time, the driver has already reported this batch as hung.
        let Some(since) = front.executing_since else { return true };
        if front.step {
            // The predictor has no times for steps.
            return false;
        }
        let spent = now.since(since);
        spent > MIN_STALLED && spent > self.time(front.rows).saturating_mul(STALLED_FACTOR)
    }

    /// Removes a batch from the lane. Its slot stays occupied.
    pub(super) fn take_batch(&mut self, id: u64, now: Timestamp) -> Option<BatchInFlight<K, T>> {
        let index = self.in_flight.iter().position(|batch| batch.id == id)?;
        let batch = self.in_flight.remove(index)?;
        if let Some(front) = self.in_flight.front_mut() {
            front.executing_since.get_or_insert(now);
        }
        Some(batch)
    }

    /// Takes all requests off the lane. The batches stay on the lane, but their answers are ignored.
    /// Streams end.
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

/// The requests that were taken off a lane.
#[derive(Debug)]
pub struct AbandonedRequests<K, T> {
    /// The requests of the batch that was executing.
    pub executing: Vec<QueuedRequest<K, T>>,
    /// The requests of the batches behind the executing one, and the steps of streams.
    pub behind: Vec<QueuedRequest<K, T>>,
}

/// Returns a predictor for a slice that includes the times that the worker measured.
fn expecting(blank: &Predictor, slice: &Slice) -> Predictor {
    let mut predictor = blank.on(slice.sms);
    for &(rows, took) in &slice.times {
        predictor.expect(rows, took);
    }
    predictor
}
