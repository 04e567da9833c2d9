//! The outcomes of changes of a share, by cause.

use shadowslice_datapath::pipeline::Total;
use shadowslice_policy::workers::Cause;

/// The number of orders of one cause since the start, by outcome, and the time that they took.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Outcomes {
    pub completed: u64,
    /// The changes that began, and whose share did not come into force.
    pub aborted: u64,
    /// The changes whose share came into force, and was taken back in its probation.
    pub rolled_back: u64,
    /// The changes that did not begin. An order for the share in force does not count as refused.
    pub refused: u64,
    /// The time from the decision to the first batch at the new share.
    pub effect: Total,
}

/// The changes of a model's share since the start.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Changes {
    pub by_hand: Outcomes,
    pub by_policy: Outcomes,
    /// The changes to another worker, because the serving worker lost its share.
    pub by_worker: Outcomes,
    /// The longest stall of each completed change.
    pub stall: Total,
}

impl Changes {
    pub(super) fn by_cause(&mut self, cause: Cause) -> &mut Outcomes {
        match cause {
            Cause::Hand => &mut self.by_hand,
            Cause::Policy => &mut self.by_policy,
            Cause::Worker => &mut self.by_worker,
        }
    }
}
