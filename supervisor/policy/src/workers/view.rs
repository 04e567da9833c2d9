//! What a report shows of the machine.

use shadowslice_shared::groups::{Division, Groups};
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::profile::Execution;
use shadowslice_shared::units::{Percent, Sms, Timestamp};

use super::Workers;
use super::change::{HandoverOutcome, OngoingChange};
use super::messages::HandoverMode;
use super::primary::Primary;
use super::slot::{AfterDrain, ExitReason, Phase, Role, StartPurpose};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkersState<'w> {
    Loading,
    Ready,
    /// The worker ends or has died; the next one follows.
    Restarting,
    Waiting(&'w str),
    Down {
        why: &'w str,
        /// When the next worker is started.
        again: Option<Timestamp>,
    },
    Stopping,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandoverPhase {
    Spawning,
    Warming,
    Draining,
    Probation,
    Retiring,
    /// The incumbent serves; the shadow leaves.
    Aborting,
}

impl Workers {
    pub fn state(&self) -> WorkersState<'_> {
        if self.stopping {
            return WorkersState::Stopping;
        }
        match &self.primary {
            Primary::Worker(worker) => match self.role(*worker) {
                Some(Role::Starting { .. }) => WorkersState::Loading,
                Some(Role::Serving { .. }) => WorkersState::Ready,
                _ => WorkersState::Restarting,
            },
            Primary::BackingOff { .. } => WorkersState::Restarting,
            Primary::AwaitingStandby { .. } => {
                WorkersState::Waiting("the standing worker, which still starts, will serve")
            }
            Primary::Waiting { why, .. } => WorkersState::Waiting(why),
            Primary::Down { why, again } => WorkersState::Down { why, again: *again },
        }
    }

    pub fn share(&self) -> Percent {
        self.share
    }

    /// A partition may have more or fewer SMs than its share comes to, as the left-over group is
    /// smaller or larger than the others.
    pub fn sms_in_force(&self) -> Sms {
        match &self.partition {
            Ok(partition) if self.serving().is_some() => partition.division().sms(partition.current()),
            _ => self.sms(self.share),
        }
    }

    /// How the GPU divides, and the groups on which batches run; `None` where the share is no
    /// partition.
    /// How long batches take on each number of SMs, as workers measured it before they served.
    pub fn execution(&self) -> Option<&Execution> {
        self.execution.as_ref()
    }

    pub fn partition(&self) -> Option<(&Division, Groups)> {
        self.partition.as_ref().ok().map(|partition| (partition.division(), partition.current()))
    }

    /// How the share is changed; and if not inside the worker, why.
    pub fn mechanism(&self) -> (&'static str, Option<&str>) {
        match (&self.partition, self.settings.handover) {
            (Ok(_), _) => ("in-process", None),
            (Err(why), HandoverMode::Restart) => ("restart", Some(why)),
            (Err(why), HandoverMode::Never) => ("never", Some(why)),
            (Err(why), _) => ("shadow", Some(why)),
        }
    }

    /// Whether a change of share has a shadow started.
    pub fn needs_shadows(&self) -> bool {
        let by_shadow = matches!(self.settings.handover, HandoverMode::Auto | HandoverMode::Shadow);
        self.partition.is_err() && by_shadow
    }

    /// `None` where no change is under way or waits. A hand-over that aborts counts, too: it blocks
    /// another one.
    pub fn coming(&self) -> Option<Percent> {
        let under_way = self.change.as_ref().filter(|_| {
            !matches!(self.handover_phase(), Some(HandoverPhase::Probation | HandoverPhase::Retiring))
        });
        self.next.or(under_way.map(|change| *change.request())).map(|request| request.share)
    }

    /// Of the worker to which traffic could move at once; of two, that of the larger one.
    pub fn ready_share(&self) -> Option<Percent> {
        let ready = [self.ready(), self.parked()].into_iter().flatten();
        ready.filter_map(|worker| self.slots.get(&worker)).map(|slot| slot.share).max()
    }

    pub fn standby_obstacle(&self) -> Option<&str> {
        self.standby_wanted().and(self.standby.obstacle.as_deref())
    }

    pub fn is_held(&self) -> bool {
        self.held
    }

    /// Deaths of workers that served or were to serve, in all; and starts in their place.
    pub fn deaths_and_restarts(&self) -> (u64, u64) {
        (self.deaths, self.restarted)
    }

    /// What the last of them died of.
    pub fn last_death(&self) -> Option<&str> {
        self.last_death.as_deref()
    }

    /// Deaths, and starts in vain.
    pub fn failures_in_a_row(&self) -> u32 {
        self.restarts.failures()
    }

    /// Whether a worker has been started and is not known to be gone.
    pub fn has(&self, worker: WorkerId) -> bool {
        self.slots.contains_key(&worker)
    }

    /// Of a worker with a partition, the model's share.
    pub fn share_of(&self, worker: WorkerId) -> Option<Percent> {
        let slot = self.slots.get(&worker)?;
        Some(if slot.partition.is_some() && self.partition.is_ok() { self.share } else { slot.share })
    }

    /// From the beginning until the worker that leaves is gone.
    pub(super) fn is_handing_over(&self) -> bool {
        matches!(self.change, Some(OngoingChange::Handover { .. }))
    }

    pub fn handover_phase(&self) -> Option<HandoverPhase> {
        if !self.is_handing_over() {
            return None;
        }
        let phase = self.slots.values().find_map(|slot| match &slot.role {
            Role::Starting { purpose: StartPurpose::Shadow, phase: Phase::Warming, .. } => {
                Some(HandoverPhase::Warming)
            }
            Role::Draining { then: AfterDrain::Park, .. } => Some(HandoverPhase::Draining),
            Role::Parked { .. } => Some(HandoverPhase::Probation),
            Role::Exiting { reason: ExitReason::Handover(HandoverOutcome::Completed), .. } => {
                Some(HandoverPhase::Retiring)
            }
            Role::Exiting { reason: ExitReason::Handover(_), .. } => Some(HandoverPhase::Aborting),
            _ => None,
        });
        // Its process starts, or waits for memory.
        Some(phase.unwrap_or(HandoverPhase::Spawning))
    }

    pub fn role_and_phase(&self, worker: WorkerId) -> (&'static str, &'static str) {
        let starting = |phase| if phase == Phase::Spawning { "starting" } else { "warming" };
        match self.role(worker) {
            Some(Role::Starting { purpose: StartPurpose::Reference, .. }) => ("reference", "warming"),
            Some(Role::Starting { purpose: StartPurpose::Serve, .. }) => ("incumbent", "warming"),
            Some(&Role::Starting { purpose: StartPurpose::Shadow, phase, .. }) => ("shadow", starting(phase)),
            Some(&Role::Starting { purpose: StartPurpose::Standby, phase, .. }) => {
                ("standby", starting(phase))
            }
            Some(Role::Serving { .. }) if self.handover_phase() == Some(HandoverPhase::Draining) => {
                ("shadow", "serving")
            }
            Some(Role::Serving { .. }) => ("incumbent", "serving"),
            Some(Role::Draining { then: AfterDrain::Park, .. }) => ("incumbent", "draining"),
            Some(Role::Parked { .. }) => ("parked", "standing"),
            Some(Role::Standby { .. }) => ("standby", "standing"),
            Some(Role::Exiting { reason: ExitReason::Handover(HandoverOutcome::Completed), .. }) => {
                ("parked", "stopping")
            }
            Some(Role::Exiting { reason: ExitReason::Handover(_), .. }) => ("shadow", "stopping"),
            Some(Role::Exiting { reason: ExitReason::Standby { .. }, .. }) => ("standby", "stopping"),
            Some(Role::Exiting { .. } | Role::Draining { then: AfterDrain::Restart, .. }) | None => {
                ("leaving", "stopping")
            }
        }
    }
}
