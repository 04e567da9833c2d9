//! Facts that a pipeline reports to its controller.

use shadowslice_shared::batch::PartitionReply;
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::Timestamp;

/// Facts that may wait for the controller. A lane gives rise to few: it drains, serves first, hangs
/// or dies once a hand-over, and hand-overs wait for the controller.
pub const FACTS: usize = 256;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LaneFact {
    /// It was told to drain, and nothing is in flight any more.
    Drained(WorkerId),
    /// Its worker completed its first batch since it was routed to.
    FirstAnswer(WorkerId, Timestamp),
    /// Its worker has made a partition ready, or could not.
    Prepared(WorkerId, PartitionReply),
    /// Its worker's socket ended, and it with that.
    Gone(WorkerId),
    /// A request has proved that it kills its workers: the model is not to blame for their deaths.
    PoisonConfirmed,
    Hung(WorkerId),
    /// Its worker said something that makes no sense, and why.
    Broken(WorkerId, String),
}
