//! The inputs and results of a scheduler.

use std::time::Duration;

use shadowslice_shared::groups::Groups;
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::Timestamp;

use super::queue::QueuedRequest;

/// The driver's part of a queued request.
pub trait Ticket {
    /// Returns true if the request needs no answer any more: its client has one, or left.
    fn is_settled(&self) -> bool;

    /// Returns true if this is a request for the next answer of a stream, which only the stream's worker
    /// can give.
    fn is_step(&self) -> bool {
        false
    }
}

impl Ticket for () {
    fn is_settled(&self) -> bool {
        false
    }
}

/// The configuration of a model's scheduler.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SchedulingRules {
    /// The time within which a request must be answered, unless its own deadline is sooner.
    pub slo: Duration,
    /// The longest time that a batch waits for further requests.
    pub max_delay: Duration,
    /// True for `on_late: reject`: late requests are refused under overload.
    pub reject_late: bool,
}

/// The reason why a scheduler refuses a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefusalReason {
    /// The queue is full.
    QueueFull,
    /// The request cannot be answered in time.
    TooLate,
    /// The deadline has passed under overload.
    Overdue,
}

/// A request that the scheduler refuses.
#[derive(Debug)]
pub struct RefusedRequest<K, T> {
    /// The request.
    pub request: QueuedRequest<K, T>,
    /// The reason for the refusal.
    pub why: RefusalReason,
}

/// A batch to send to a worker.
#[derive(Debug)]
pub struct OutgoingBatch<K, T> {
    /// The worker that gets the batch.
    pub worker: WorkerId,
    /// The batch's number, unique among the model's batches.
    pub id: u64,
    /// The slot of the worker's response slab that the batch occupies.
    pub slot: u8,
    /// The groups of SMs on which the batch executes.
    pub groups: Groups,
    /// The requests, at least one and all of one shape.
    pub requests: Vec<QueuedRequest<K, T>>,
}

/// The next action of a scheduler's driver.
#[derive(Debug)]
pub enum NextAction<K, T> {
    /// The driver refuses these requests and sends the batch. For the batch it then calls
    /// [`confirm_sent`](super::Scheduler::confirm_sent) or
    /// [`return_unsent`](super::Scheduler::return_unsent).
    Act(Vec<RefusedRequest<K, T>>, Option<OutgoingBatch<K, T>>),
    /// The driver does nothing for now.
    Wait(SchedulerWait),
}

/// The event that a scheduler waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SchedulerWait {
    /// A request or an answer: the queue is empty, or the lane has no free slot.
    Idle,
    /// This time, at which the next batch is due.
    Until(Timestamp),
    /// A worker that serves: requests are queued, and no lane takes them.
    NoLane,
}

/// The effect of a completed batch on predictions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompletedBatch {
    /// True if the batch ran on the lane's present SMs, so that its time counts in predictions.
    pub observed: bool,
    /// True if this is the first answer on these SMs since traffic moved to the lane.
    pub first: bool,
}
