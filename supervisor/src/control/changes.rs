//! Changes of a share: who wants them, and what became of them.

use std::time::Duration;

use super::standing::HandoverReport;
use crate::pipeline::LatencyHistogram;

/// Who wants a share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// People.
    Hand,
    /// The policy.
    Policy,
}

/// What became of the orders of one who gives them, since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Outcomes {
    /// The share came into force.
    pub completed: u64,
    /// It was begun, and did not.
    pub aborted: u64,
    /// It was not begun. A share that is in force already is no refusal.
    pub refused: u64,
}

/// A model's changes of share since the start.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Changes {
    /// Those by hand.
    pub by_hand: Outcomes,
    /// The policy's.
    pub by_policy: Outcomes,
    /// From the order to the first batch at the new share.
    pub effect: LatencyHistogram,
    /// The longest stall of each.
    pub stall: LatencyHistogram,
}

impl Changes {
    /// What became of `cause`'s orders.
    pub(super) fn of(&mut self, cause: Cause) -> &mut Outcomes {
        match cause {
            Cause::Hand => &mut self.by_hand,
            Cause::Policy => &mut self.by_policy,
        }
    }

    /// A share came into force.
    pub(super) fn completed(&mut self, cause: Cause, report: &HandoverReport) {
        self.of(cause).completed += 1;
        self.stall.record(Duration::from_secs_f64(report.stall_us / 1e6));
    }
}
