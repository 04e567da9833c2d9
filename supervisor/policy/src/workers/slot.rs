//! A worker's place in the machine: its role, and how far it is in it.

use shadowslice_shared::groups::Groups;
use shadowslice_shared::units::{Percent, Timestamp};

use super::change::HandoverOutcome;

/// One process, from the order to start it to its exit.
#[derive(Debug)]
pub(super) struct Slot {
    /// The share with which the worker was started.
    pub(super) share: Percent,
    /// Where the share is a partition inside the worker: the one that it has ready as it becomes
    /// warm. Such a worker has all SMs, and can have any share.
    pub(super) partition: Option<Groups>,
    pub(super) role: Role,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Role {
    Starting {
        purpose: StartPurpose,
        phase: Phase,
        until: Timestamp,
    },
    /// The worker has the traffic.
    Serving {
        since: Timestamp,
    },
    /// The traffic was taken from it, and it finishes what it has.
    Draining {
        then: AfterDrain,
        until: Timestamp,
    },
    /// It has served until the cut-over, and takes the traffic back if the shadow fails.
    Parked {
        until: Timestamp,
    },
    /// Traffic can move to it at once.
    Standby {
        since: Timestamp,
    },
    /// When it has not ended by `until`, it is killed, again and again.
    Exiting {
        reason: ExitReason,
        killed: bool,
        until: Timestamp,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StartPurpose {
    /// It writes the reference answers, and goes.
    Reference,
    /// No other worker serves.
    Serve,
    Shadow,
    Standby,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    Spawning,
    Warming,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AfterDrain {
    Park,
    /// It ends, and another worker starts in its place.
    Restart,
}

/// What follows when a worker that leaves is gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ExitReason {
    /// No worker serves until then: that is the death of the model's worker, of this cause if it is
    /// known before the exit. `since`: it has served since then, and whether it had no batch is
    /// heard at its exit.
    Primary {
        why: Option<String>,
        since: Option<Timestamp>,
    },
    /// Another worker starts in its place, at the share that is asked for.
    Replaced,
    Handover(HandoverOutcome),
    /// The next standing worker starts so long after it.
    Standby {
        cooldown: std::time::Duration,
        failed: bool,
    },
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
