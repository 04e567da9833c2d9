//! Changes of a share: what became of them, by their causes.

use shadowslice_datapath::pipeline::Total;
use shadowslice_policy::workers::Cause;

/// What became of the orders of one cause, since the start, and how long they took.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Outcomes {
    pub completed: u64,
    /// The change was begun, and the share did not come into force.
    pub aborted: u64,
    /// The share came into force, and was taken back in its probation.
    pub rolled_back: u64,
    /// It was not begun. A share that is in force already is no refusal.
    pub refused: u64,
    /// From the decision to the first batch at the new share.
    pub effect: Total,
}

#[derive(Debug, Clone, PartialEq, Default)]
pub struct Changes {
    pub by_hand: Outcomes,
    pub by_policy: Outcomes,
    /// Changes to another worker, as the serving worker could not have the share any more.
    pub by_worker: Outcomes,
    /// The longest stall of each.
    pub stall: Total,
}

impl Changes {
    pub(super) fn of(&mut self, cause: Cause) -> &mut Outcomes {
        match cause {
            Cause::Hand => &mut self.by_hand,
            Cause::Policy => &mut self.by_policy,
            Cause::Worker => &mut self.by_worker,
        }
    }
}
