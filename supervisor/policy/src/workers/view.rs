//! The state of a model's workers as reports show it.

use shadowslice_shared::groups::{Division, Groups};
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::profile::Execution;
use shadowslice_shared::units::{Percent, Sms, Timestamp};

use super::Workers;
use super::change::{HandoverOutcome, OngoingChange};
use super::messages::HandoverMode;
use super::primary::Primary;
use super::slot::{ExitReason, Role, StartPhase, StartPurpose};

/// The state of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkersState<'w> {
    /// The first worker is starting.
    Loading,
    /// A worker is serving.
    Ready,
    /// The worker is exiting or has died, and another worker will replace it.
    Restarting,
    /// The model waits before it can start a worker. The text is the reason.
    Waiting(&'w str),
    /// The model refuses requests.
    Down {
        /// The reason why the model is down.
        why: &'w str,
        /// The time at which the next worker starts, if one is planned.
        again: Option<Timestamp>,
    },
    /// All workers are exiting.
    Stopping,
}

/// The phase of a hand-over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandoverPhase {
    /// The shadow's process is starting, or waits for GPU memory.
    Spawning,
    /// The shadow is loading the model and warming up.
    Warming,
    /// The shadow serves, and the incumbent finishes its batches.
    Draining,
    /// The new share is in force, and the incumbent is parked.
    Probation,
    /// The incumbent is exiting.
    Retiring,
    /// The hand-over failed. The incumbent serves, and the shadow is exiting.
    Aborting,
}

impl Workers {
    /// Returns the state of the model.
    pub fn state(&self) -> WorkersState<'_> {
        if self.stopping {
            return WorkersState::Stopping;
        }
        match &self.processes.primary {
            Primary::Worker(worker) => match self.processes.role(*worker) {
                Some(Role::Starting { .. }) => WorkersState::Loading,
                Some(Role::Serving { .. }) => WorkersState::Ready,
                _ => WorkersState::Restarting,
            },
            Primary::BackingOff { .. } => WorkersState::Restarting,
            Primary::AwaitingStandby { .. } => {
                WorkersState::Waiting("the standby is still starting and will serve when it is warm")
            }
            Primary::Waiting { why, .. } => WorkersState::Waiting(why),
            Primary::Down { why, again } => WorkersState::Down { why, again: *again },
        }
    }

    /// Returns the share in force.
    pub fn share(&self) -> Percent {
        self.share
    }

    /// Returns the number of SMs in force. For a partition, this number can differ from the SMs of the
    /// share, because the last group may not have the same size as the other groups.
    pub fn sms_in_force(&self) -> Sms {
        match &self.relocator {
            Ok(relocator) if self.processes.serving().is_some() => {
                relocator.division().sms(relocator.current())
            }
            _ => self.sms(self.share),
        }
    }

    /// Returns the times of batches by number of SMs. Workers measured them before they served.
    pub fn execution(&self) -> Option<&Execution> {
        self.execution.as_ref()
    }

    /// Returns the division of the GPU, and the groups on which batches run. Returns `None` if the
    /// share is not a partition.
    pub fn partition(&self) -> Option<(&Division, Groups)> {
        self.relocator.as_ref().ok().map(|relocator| (relocator.division(), relocator.current()))
    }

    /// Returns the mechanism by which the share changes. If the share cannot change inside the worker,
    /// also returns the reason.
    pub fn mechanism(&self) -> (&'static str, Option<&str>) {
        match (&self.relocator, self.settings.handover) {
            (Ok(_), _) => ("in-process", None),
            (Err(why), HandoverMode::Never) => ("never", Some(why)),
            (Err(why), _) => ("shadow", Some(why)),
        }
    }

    /// Returns true if changes of share start a shadow.
    pub fn needs_shadows(&self) -> bool {
        let by_shadow = matches!(self.settings.handover, HandoverMode::Auto | HandoverMode::Shadow);
        self.relocator.is_err() && by_shadow
    }

    /// Returns the requested share of the waiting change. If no change waits, returns the requested
    /// share of the change in progress. A hand-over that aborts counts as in progress, because it
    /// blocks the next change.
    pub fn coming(&self) -> Option<Percent> {
        let under_way = self.change.as_ref().filter(|_| {
            !matches!(self.handover_phase(), Some(HandoverPhase::Probation | HandoverPhase::Retiring))
        });
        self.next.or(under_way.map(|change| *change.request())).map(|request| request.share)
    }

    /// Returns the share of the worker to which traffic could move immediately. If two workers are
    /// ready, returns the larger share.
    pub fn ready_share(&self) -> Option<Percent> {
        let ready = [self.processes.ready(), self.processes.parked()].into_iter().flatten();
        ready.filter_map(|worker| self.processes.slot(worker)).map(|slot| slot.share).max()
    }

    /// Returns the reason why the model has no standby although it should have one.
    pub fn standby_obstacle(&self) -> Option<&str> {
        self.standby_wanted().and(self.processes.standby.obstacle.as_deref())
    }

    /// Returns true if the policy must not change the share.
    pub fn is_held(&self) -> bool {
        self.held
    }

    /// Returns the number of deaths of workers that served or were starting to serve, and the number of
    /// starts that replaced these workers.
    pub fn deaths_and_restarts(&self) -> (u64, u64) {
        (self.processes.deaths, self.processes.restarted)
    }

    /// Returns the cause of the last death.
    pub fn last_death(&self) -> Option<&str> {
        self.processes.last_death.as_deref()
    }

    /// Returns the number of consecutive deaths and failed starts since the last answer.
    pub fn failures_in_a_row(&self) -> u32 {
        self.processes.restarts.failures()
    }

    /// Returns true if this worker was started and its exit has not been reported.
    pub fn has(&self, worker: WorkerId) -> bool {
        self.processes.slot(worker).is_some()
    }

    /// Returns the share of a worker. If the worker has a partition, this is the model's share.
    pub fn share_of(&self, worker: WorkerId) -> Option<Percent> {
        let slot = self.processes.slot(worker)?;
        Some(if slot.partition.is_some() && self.relocator.is_ok() { self.share } else { slot.share })
    }

    /// Returns true during a hand-over, including the exit of the worker that is no longer needed.
    pub(super) fn is_handing_over(&self) -> bool {
        matches!(self.change, Some(OngoingChange::Handover { .. }))
    }

    /// Returns the phase of the current hand-over.
    pub fn handover_phase(&self) -> Option<HandoverPhase> {
        if !self.is_handing_over() {
            return None;
        }
        let phase = self.processes.find_map(|role| match role {
            Role::Starting { purpose: StartPurpose::Shadow, phase: StartPhase::Warming, .. } => {
                Some(HandoverPhase::Warming)
            }
            Role::Draining { .. } => Some(HandoverPhase::Draining),
            Role::Parked { .. } => Some(HandoverPhase::Probation),
            Role::Exiting { reason: ExitReason::Handover(HandoverOutcome::Completed), .. } => {
                Some(HandoverPhase::Retiring)
            }
            Role::Exiting { reason: ExitReason::Handover(_), .. } => Some(HandoverPhase::Aborting),
            _ => None,
        });
        // If no worker has one of these roles, the shadow's process is starting or waits for memory.
        Some(phase.unwrap_or(HandoverPhase::Spawning))
    }

    /// Returns the role and the phase of a worker as shown in status reports.
    pub fn role_and_phase(&self, worker: WorkerId) -> (&'static str, &'static str) {
        let starting = |phase| if phase == StartPhase::Spawning { "starting" } else { "warming" };
        match self.processes.role(worker) {
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
            Some(Role::Draining { .. }) => ("incumbent", "draining"),
            Some(Role::Parked { .. }) => ("parked", "standing"),
            Some(Role::Standby { .. }) => ("standby", "standing"),
            Some(Role::Exiting { reason: ExitReason::Handover(HandoverOutcome::Completed), .. }) => {
                ("parked", "stopping")
            }
            Some(Role::Exiting { reason: ExitReason::Handover(_), .. }) => ("shadow", "stopping"),
            Some(Role::Exiting { reason: ExitReason::Standby { .. }, .. }) => ("standby", "stopping"),
            Some(Role::Exiting { .. }) | None => ("leaving", "stopping"),
        }
    }
}
