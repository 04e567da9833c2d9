//! Events of lanes, which a pipeline reports to its controller.

use shadowslice_shared::batch::Prepared;
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::Timestamp;

/// The most events that may wait for the controller. A lane causes few: it drains, serves first,
/// hangs or dies once in a hand-over, and hand-overs wait for the controller.
pub const EVENT_QUEUE_SIZE: usize = 256;

/// An event of a lane.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LaneEvent {
    /// The lane was draining, and nothing is in flight any more.
    Drained(WorkerId),
    /// The worker completed its first batch since requests were routed to it.
    FirstAnswer(WorkerId, Timestamp),
    /// The worker has prepared a partition, or could not.
    Prepared(WorkerId, Prepared),
    /// The worker's socket has closed, and the lane has ended.
    Gone(WorkerId),
    /// A request is known to kill workers, so the model is not to blame for their deaths.
    PoisonConfirmed,
    /// The worker hangs.
    Hung(WorkerId),
    /// The worker sent an invalid message, for this reason.
    Broken(WorkerId, String),
}
