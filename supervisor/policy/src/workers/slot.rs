//! The slot of a worker, which contains its role and the progress in this role.

use shadowslice_shared::groups::Groups;
use shadowslice_shared::units::{Percent, Timestamp};

use super::change::HandoverOutcome;

/// A worker process, from the order to start it until its exit.
#[derive(Debug)]
pub(super) struct Slot {
    /// The share with which the worker was started.
    pub(super) share: Percent,
    /// The partition that the worker has ready when it is warm, if the share is a partition inside the
    /// worker. The process of such a worker may use all SMs, so the worker can have any share.
    pub(super) partition: Option<Groups>,
    pub(super) role: Role,
}

/// The role of a worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Role {
    /// The worker is starting.
    Starting { purpose: StartPurpose, phase: StartPhase, until: Timestamp },
    /// The worker gets all traffic.
    Serving { since: Timestamp },
    /// The worker no longer gets traffic, and finishes its batches. It is then parked.
    Draining { until: Timestamp },
    /// The worker served until the cut-over. If the shadow fails, this worker takes the traffic back.
    Parked { until: Timestamp },
    /// The worker is warm, and traffic can move to it immediately.
    Standby { since: Timestamp },
    /// The worker is exiting. If it has not exited by `until`, it is killed, repeatedly if necessary.
    Exiting { reason: ExitReason, killed: bool, until: Timestamp },
}

/// The purpose for which a worker is started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StartPurpose {
    /// The worker writes the reference answers, and then exits.
    Reference,
    /// The worker serves, because no other worker serves.
    Serve,
    /// The worker takes the traffic over from the incumbent, with a new share.
    Shadow,
    /// The worker becomes a standby.
    Standby,
}

/// The phase of a worker's start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StartPhase {
    Spawning,
    Warming,
}

/// The reason for an exit, which determines the reaction to the exit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ExitReason {
    /// The serving worker dies, and no other worker serves before its exit. `why` is the cause, if the
    /// cause is known before the exit. `since` is set if the worker served and the exit event reports
    /// whether the worker had a batch.
    Primary { why: Option<String>, since: Option<Timestamp> },
    /// The hand-over ends when this worker has exited, with this outcome.
    Handover(HandoverOutcome),
    /// The worker was a standby. The next standby starts after this cooldown.
    Standby { cooldown: std::time::Duration, failed: bool },
    /// The exit requires no reaction.
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
