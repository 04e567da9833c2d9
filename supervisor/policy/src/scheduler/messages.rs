//! What a scheduler is told, and what it says.

use std::time::Duration;

use shadowslice_shared::groups::Groups;
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::Moment;

use super::queue::Entry;

/// A request, as its driver sees it.
pub trait Ticket {
    /// Whether the request needs no answer any more, because its client has one or does not wait.
    fn is_settled(&self) -> bool;
}

impl Ticket for () {
    fn is_settled(&self) -> bool {
        false
    }
}

/// What holds for a model's requests.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rules {
    /// The latency that is promised: it sets every request's deadline, unless the request's own is
    /// sooner.
    pub slo: Duration,
    /// How long a batch that is not full waits for more.
    pub max_delay: Duration,
    /// Whether late requests are refused under overload: `on_late: reject`.
    pub reject_late: bool,
}

/// Why a request is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// No more requests may wait.
    QueueFull,
    /// It cannot be answered in time.
    TooLate,
    /// Its time is up, and the queue stands.
    Overdue,
}

/// A request that is refused.
#[derive(Debug)]
pub struct Refused<K, T> {
    /// The request.
    pub request: Entry<K, T>,
    /// Why.
    pub why: Refusal,
}

/// A batch to send; a request at least, all of one shape.
#[derive(Debug)]
pub struct Sending<K, T> {
    /// To this worker.
    pub worker: WorkerId,
    /// Its name, which no other batch of the model has.
    pub id: u64,
    /// The slot that it takes.
    pub slot: u8,
    /// The partition on which it runs.
    pub groups: Groups,
    /// What is in it.
    pub requests: Vec<Entry<K, T>>,
}

/// What is to be done next.
#[derive(Debug)]
pub enum Next<K, T> {
    /// Refuse these requests, and send that batch; then call [`sent`](super::Scheduler::sent) or
    /// [`not_sent`](super::Scheduler::not_sent).
    Act(Vec<Refused<K, T>>, Option<Sending<K, T>>),
    /// Nothing, for now.
    Rest(Rest),
}

/// Why nothing is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rest {
    /// Nothing waits, or there is no room; an answer, or a request, changes that.
    Idle,
    /// Requests wait until then for company, or for the lane.
    Until(Moment),
    /// Requests wait, and no lane serves.
    NoLane,
}

/// What an answered batch says of its lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completed {
    /// Whether it ran where the lane's batches run now.
    pub here: bool,
    /// Whether it is the first there since the lane was routed to.
    pub first: bool,
}
