//! The inputs and results of a scheduler.

use std::time::Duration;

use shadowslice_shared::groups::Groups;
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::Timestamp;

use super::queue::QueuedRequest;

/// A handle by which the caller of the scheduler (the driver) identifies a queued request.
pub trait Ticket {
    /// Returns true if the request no longer needs an answer, because its client already has an answer
    /// or has disconnected.
    fn is_settled(&self) -> bool;

    /// Returns true if this is a request for the next answer of a stream. Only the worker of the stream
    /// can answer it.
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
    /// The SLO: the time within which a request must be answered, unless the request's own deadline is
    /// earlier.
    pub slo: Duration,
    /// The SLO of each further answer of a stream, or `None` if it has none.
    pub next_slo: Option<Duration>,
    /// The maximum time for which a batch waits for further requests.
    pub max_delay: Duration,
    /// True if the configuration has `on_late: reject`. Under overload, late requests are then refused.
    pub reject_late: bool,
}

/// The reason why a scheduler refuses a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefusalReason {
    /// The queue is full.
    QueueFull,
    /// The memory for requests is full, and another tenant has less than its part.
    MemoryFull,
    /// The request cannot be answered in time.
    TooLate,
    /// The request cannot be answered while its client waits.
    Expires,
    /// The deadline of the request has passed, and the model is overloaded.
    Overdue,
    /// The deadline of the request has passed, and the model still sleeps.
    Asleep,
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
    /// The id of the batch, unique among the model's batches.
    pub id: u64,
    /// The slot of the worker's response slab that the batch occupies.
    pub slot: u8,
    /// The groups of SMs on which the batch executes.
    pub groups: Groups,
    /// The requests. There is at least one, and all have the same shape.
    pub requests: Vec<QueuedRequest<K, T>>,
}

/// The next action of the scheduler's driver.
#[derive(Debug)]
pub enum NextAction<K, T> {
    /// The driver refuses these requests and sends the batch. It then calls
    /// [`confirm_sent`](super::Scheduler::confirm_sent) or
    /// [`return_unsent`](super::Scheduler::return_unsent) for the batch.
    Act(Vec<RefusedRequest<K, T>>, Option<OutgoingBatch<K, T>>),
    /// The driver waits for an event.
    Wait(SchedulerWait),
}

/// The event for which a scheduler waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SchedulerWait {
    /// A new request or an answer. Either the queue is empty, or the lane has no free slot.
    Idle,
    /// The time at which the next batch is due.
    Until(Timestamp),
    /// A worker that serves. Requests are queued, but no lane accepts them.
    NoLane,
    /// A worker that has its weights. Requests are queued, but the model sleeps.
    Asleep,
}

/// The effect of a completed batch on predictions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompletedBatch {
    /// True if the batch ran on the SMs that the lane uses now, so that its time improves predictions.
    pub observed: bool,
    /// True if this is the first answer on these SMs since the lane took the traffic over.
    pub first: bool,
}
