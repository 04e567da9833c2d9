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
    /// The model sleeps without a worker. It accepts requests, and the first one starts a worker.
    Asleep,
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

/// The role of a worker, as status reports show it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkerRole {
    /// The worker serves or will serve, or finishes its batches after a cut-over.
    Incumbent,
    /// The worker takes the traffic over from the incumbent, with a new share.
    Shadow,
    /// The worker is or becomes the warm standby.
    Standby,
    /// The worker served until a hand-over, and can take the traffic back.
    Parked,
    /// The worker computes the reference answers.
    Reference,
    /// The worker exits for another reason.
    Leaving,
}

/// The phase of a worker's life, as status reports show it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WorkerPhase {
    /// The process is starting.
    Starting,
    /// The worker is loading the model and warming up.
    Warming,
    /// The worker gets all traffic.
    Serving,
    /// The worker finishes its batches.
    Draining,
    /// The worker is warm and gets no traffic.
    Standing,
    /// The worker is exiting.
    Stopping,
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
            Primary::Asleep => WorkersState::Asleep,
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

    /// Returns the reason why the share cannot change inside the worker.
    pub fn no_partition(&self) -> Option<&str> {
        self.relocator.as_ref().err().map(String::as_str)
    }

    /// Returns the configured mechanism for changes of the share.
    pub fn handover_mode(&self) -> HandoverMode {
        self.settings.handover
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

    /// Returns the role and the phase of a worker for status reports. A worker that has not been
    /// started, or whose exit has been reported, is leaving.
    pub fn role_and_phase(&self, worker: WorkerId) -> (WorkerRole, WorkerPhase) {
        let starting =
            |phase| if phase == StartPhase::Spawning { WorkerPhase::Starting } else { WorkerPhase::Warming };
        match self.processes.role(worker) {
            Some(Role::Starting { purpose: StartPurpose::Reference, .. }) => {
                (WorkerRole::Reference, WorkerPhase::Warming)
            }
            Some(Role::Starting { purpose: StartPurpose::Serve, .. }) => {
                (WorkerRole::Incumbent, WorkerPhase::Warming)
            }
            Some(&Role::Starting { purpose: StartPurpose::Shadow, phase, .. }) => {
                (WorkerRole::Shadow, starting(phase))
            }
            Some(&Role::Starting { purpose: StartPurpose::Standby, phase, .. }) => {
                (WorkerRole::Standby, starting(phase))
            }
            Some(Role::Serving { .. }) if self.handover_phase() == Some(HandoverPhase::Draining) => {
                (WorkerRole::Shadow, WorkerPhase::Serving)
            }
            Some(Role::Serving { .. }) => (WorkerRole::Incumbent, WorkerPhase::Serving),
            Some(Role::Draining { .. }) => (WorkerRole::Incumbent, WorkerPhase::Draining),
            Some(Role::Parked { .. }) => (WorkerRole::Parked, WorkerPhase::Standing),
            Some(Role::Standby { .. }) => (WorkerRole::Standby, WorkerPhase::Standing),
            Some(Role::Exiting { reason: ExitReason::Handover(HandoverOutcome::Completed), .. }) => {
                (WorkerRole::Parked, WorkerPhase::Stopping)
            }
            Some(Role::Exiting { reason: ExitReason::Handover(_), .. }) => {
                (WorkerRole::Shadow, WorkerPhase::Stopping)
            }
            Some(Role::Exiting { reason: ExitReason::Standby { .. }, .. }) => {
                (WorkerRole::Standby, WorkerPhase::Stopping)
            }
            Some(Role::Exiting { .. }) | None => (WorkerRole::Leaving, WorkerPhase::Stopping),
        }
    }
}
