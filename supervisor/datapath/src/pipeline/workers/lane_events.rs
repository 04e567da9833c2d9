//! The events of lanes that a pipeline reports to its controller.

use shadowslice_shared::batch::PartitionReply;
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::Timestamp;

/// The largest number of events that can wait for the controller. In a hand-over, a lane causes
/// only a few events, and the controller reads them before the next hand-over.
pub const EVENT_QUEUE_SIZE: usize = 256;

/// An event of a lane that the controller must know about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LaneEvent {
    /// The lane was draining, and its last request in flight has ended.
    Drained(WorkerId),
    /// The worker completed its first batch on its current SMs since requests were routed to this
    /// worker.
    FirstAnswer(WorkerId, Timestamp),
    /// The worker has prepared a partition, or failed to prepare it.
    Prepared(WorkerId, PartitionReply),
    /// The worker has released its weights.
    Asleep(WorkerId),
    /// The worker has loaded its weights again, and may have sent their descriptors.
    Awake(WorkerId),
    /// The worker has no batches and must exit, because the model sleeps and the worker cannot release its
    /// weights.
    Dismissed(WorkerId),
    /// The model must serve again after a sleep without a worker.
    Recalled,
    /// The worker's socket has closed, and the lane has ended.
    Gone(WorkerId),
    /// A request is known to kill workers, so the deaths of these workers do not count as failures
    /// of the model.
    PoisonConfirmed,
    /// The worker hangs.
    Hung(WorkerId),
    /// The worker sent an invalid message. The text says what is invalid.
    Broken(WorkerId, String),
}
