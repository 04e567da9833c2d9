//! What a scheduler is told, and what it says.

use std::time::Duration;

use shadowslice_shared::groups::Groups;
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::Timestamp;

use super::queue::QueuedRequest;

pub trait Ticket {
    /// The request needs no answer any more: its client has one or does not wait.
    fn is_settled(&self) -> bool;

    /// It asks for the next answer of a stream, which only the stream's worker can give.
    fn is_step(&self) -> bool {
        false
    }
}

impl Ticket for () {
    fn is_settled(&self) -> bool {
        false
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SchedulingRules {
    /// Every request's deadline, unless the request's own is sooner.
    pub slo: Duration,
    /// How long a batch that is not full waits for more.
    pub max_delay: Duration,
    /// Under overload: `on_late: reject`.
    pub reject_late: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefusalReason {
    QueueFull,
    TooLate,
    /// Its time is up, and the queue stands.
    Overdue,
}

#[derive(Debug)]
pub struct RefusedRequest<K, T> {
    pub request: QueuedRequest<K, T>,
    pub why: RefusalReason,
}

/// At least one request, all of one shape.
#[derive(Debug)]
pub struct OutgoingBatch<K, T> {
    pub worker: WorkerId,
    /// Unique among the model's batches.
    pub id: u64,
    pub slot: u8,
    pub groups: Groups,
    pub requests: Vec<QueuedRequest<K, T>>,
}

#[derive(Debug)]
pub enum NextAction<K, T> {
    /// Refuse these requests, and send that batch; then call [`confirm_sent`](super::Scheduler::confirm_sent) or
    /// [`return_unsent`](super::Scheduler::return_unsent).
    Act(Vec<RefusedRequest<K, T>>, Option<OutgoingBatch<K, T>>),
    Wait(SchedulerWait),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SchedulerWait {
    /// Nothing waits, or there is no room; an answer, or a request, changes that.
    Idle,
    Until(Timestamp),
    NoLane,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompletedBatch {
    /// It ran where the lane's batches run now, and its time says something of others'.
    pub observed: bool,
    /// It is the first there since the lane was routed to.
    pub first: bool,
}
