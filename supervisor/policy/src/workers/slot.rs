//! A worker's place in the machine: its role, and how far it is in it.

use shadowslice_shared::groups::Groups;
use shadowslice_shared::units::{Moment, Percent};

use super::change::Outcome;

/// A worker: one process, from the order to start it to its exit.
#[derive(Debug)]
pub(super) struct Slot {
    /// The share with which it was started.
    pub(super) share: Percent,
    /// Where its share is a partition inside it: the one that it has ready as it becomes warm. Such
    /// a worker has all SMs, and can have any share.
    pub(super) partition: Option<Groups>,
    pub(super) role: Role,
}

/// What a worker is for, and until when.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Role {
    /// It starts.
    Starting { aim: Aim, phase: Phase, until: Moment },
    /// It has the traffic.
    Serving { since: Moment },
    /// The traffic was taken from it, and it finishes what it has.
    Draining { then: Drained, until: Moment },
    /// It has served until the cut-over, and takes the traffic back if the shadow fails.
    Parked { until: Moment },
    /// It is the standing worker, to which traffic can move at once.
    Standing { since: Moment },
    /// It is to end; when it has not by `until`, it is killed, again and again.
    Leaving { leaver: Leaver, killed: bool, until: Moment },
}

/// What a worker that starts is to become.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Aim {
    /// It writes the reference answers, and goes.
    Reference,
    /// It serves, as no worker does.
    Serve,
    /// It takes the traffic over.
    Shadow,
    /// It stands ready.
    Stand,
}

/// How far a worker's start is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Its process starts.
    Spawning,
    /// It loads, warms up and proves itself.
    Warming,
}

/// What follows when a worker has nothing in flight any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Drained {
    /// It is parked.
    Park,
    /// It ends, and another worker starts in its place.
    Restart,
}

/// What follows when a worker that leaves is gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Leaver {
    /// No worker serves until then: that is the death of the model's worker, of this cause if it is
    /// known before the exit. `since`: it has served since then, and whether it had no batch is heard
    /// at its exit.
    Primary { why: Option<String>, since: Option<Moment> },
    /// Another worker starts in its place, at the share that is asked for.
    Replaced,
    /// The hand-over is over.
    Handover(Outcome),
    /// The next standing worker starts so long after it.
    Standing { rest: std::time::Duration, failed: bool },
    /// Nothing.
    Unneeded,
}

impl Role {
    /// When it must have ended.
    pub(super) fn until(&self) -> Option<Moment> {
        match *self {
            Self::Starting { until, .. }
            | Self::Draining { until, .. }
            | Self::Parked { until }
            | Self::Leaving { until, .. } => Some(until),
            Self::Serving { .. } | Self::Standing { .. } => None,
        }
    }

    pub(super) fn starts_as(&self, wanted: Aim) -> bool {
        matches!(*self, Self::Starting { aim, .. } if aim == wanted)
    }

    /// Whether it is the standing worker, in any phase.
    pub(super) fn is_standing(&self) -> bool {
        let leaves = matches!(self, Self::Leaving { leaver: Leaver::Standing { .. }, .. });
        leaves || matches!(self, Self::Standing { .. }) || self.starts_as(Aim::Stand)
    }
}
