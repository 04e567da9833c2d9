//! The slot of a worker: its role, and its progress in it.

use shadowslice_shared::groups::Groups;
use shadowslice_shared::units::{Percent, Timestamp};

use super::change::HandoverOutcome;

/// One process, from the order to start it to its exit.
#[derive(Debug)]
pub(super) struct Slot {
    /// The share with which the worker was started.
    pub(super) share: Percent,
    /// The partition that the worker has ready once it is warm, if the share is a partition inside
    /// the worker. A worker with a partition has all SMs and can have any share.
    pub(super) partition: Option<Groups>,
    pub(super) role: Role,
}

/// The role of a worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Role {
    /// The worker starts for a purpose.
    Starting { purpose: StartPurpose, phase: Phase, until: Timestamp },
    /// The worker has the traffic.
    Serving { since: Timestamp },
    /// The worker lost the traffic and finishes its batches.
    Draining { then: AfterDrain, until: Timestamp },
    /// The worker served until the cut-over, and takes the traffic back if the shadow fails.
    Parked { until: Timestamp },
    /// The worker is warm, and traffic can move to it at once.
    Standby { since: Timestamp },
    /// The worker exits. If it has not exited by `until`, it is killed repeatedly.
    Exiting { reason: ExitReason, killed: bool, until: Timestamp },
}

/// The purpose for which a worker starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StartPurpose {
    /// The worker writes the reference answers and exits.
    Reference,
    /// The worker serves, because no other does.
    Serve,
    /// The worker takes over from the incumbent at a new share.
    Shadow,
    /// The worker becomes a standby.
    Standby,
}

/// The phase of a start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Spawning,
    Warming,
}

/// The next role of a worker after it drained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AfterDrain {
    /// The worker is parked.
    Park,
    /// The worker exits, and another one starts in its place.
    Restart,
}

/// The reason of an exit, which decides what follows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ExitReason {
    /// The exit is the death of the model's worker, and no worker serves until then. `why` is the
    /// cause if it is known before the exit. `since` is set if the worker served; the exit then
    /// tells whether it had a batch.
    Primary { why: Option<String>, since: Option<Timestamp> },
    /// Another worker starts in its place, at the requested share.
    Replaced,
    /// The hand-over ends with this outcome.
    Handover(HandoverOutcome),
    /// The next standby starts after this cooldown.
    Standby { cooldown: std::time::Duration, failed: bool },
    /// The exit has no consequences.
    Unneeded,
}

impl Role {
    pub(super) fn until(&self) -> Option<Timestamp> {
        match *self {
            Self::Starting { until, .. }
            | Self::Draining { until, .. }
            | Self::Parked { until }
            | Self::Exiting { until, .. } => Some(until),
            Self::Serving { .. } | Self::Standby { .. } => None,
        }
    }

    pub(super) fn starts_as(&self, wanted: StartPurpose) -> bool {
        matches!(*self, Self::Starting { purpose, .. } if purpose == wanted)
    }

    pub(super) fn is_standby(&self) -> bool {
        let leaves = matches!(self, Self::Exiting { reason: ExitReason::Standby { .. }, .. });
        leaves || matches!(self, Self::Standby { .. }) || self.starts_as(StartPurpose::Standby)
    }
}
