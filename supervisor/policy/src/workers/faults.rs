//! The handling of workers that exceed a time limit, hang, violate the protocol or die.

use shadowslice_shared::ids::WorkerId;

use super::Workers;
use super::change::{HandoverFailure, HandoverOutcome};
use super::messages::Action;
use super::slot::{ExitReason, Role, StartPhase, StartPurpose};

impl Workers {
    pub(super) fn on_timeout(&mut self, worker: WorkerId) {
        let Some(role) = self.processes.role(worker).cloned() else { return };
        match role {
            Role::Starting { purpose, phase, .. } => self.starts_too_long(worker, purpose, phase),
            Role::Draining { .. } => self.drains_too_long(worker),
            Role::Parked { .. } => self.retire(worker),
            Role::Exiting { reason, killed, .. } => self.leaves_too_long(worker, reason, killed),
            Role::Serving { .. } | Role::Standby { .. } => {}
        }
    }

    fn starts_too_long(&mut self, worker: WorkerId, purpose: StartPurpose, phase: StartPhase) {
        const TOO_LONG: &str = "the worker did not start in time (timeouts.spawn, timeouts.warm)";
        match (purpose, phase) {
            (StartPurpose::Reference | StartPurpose::Serve, _) => {
                let why = Some(TOO_LONG.to_owned());
                self.kill(worker, ExitReason::Primary { why, since: None }, TOO_LONG);
            }
            (StartPurpose::Shadow, StartPhase::Spawning) => {
                self.give_up_shadow(worker, HandoverFailure::SpawnTimedOut, TOO_LONG)
            }
            (StartPurpose::Shadow, StartPhase::Warming) => {
                self.give_up_shadow(worker, HandoverFailure::WarmTimedOut, TOO_LONG)
            }
            (StartPurpose::Standby, _) => self.fail_standby(worker, TOO_LONG),
        }
    }

    /// Kills a worker that has not exited. If the worker survives the first kill, changes no longer
    /// wait for its exit. Only starts of workers that need its memory still wait.
    fn leaves_too_long(&mut self, worker: WorkerId, reason: ExitReason, killed: bool) {
        let why = if killed {
            "the worker is still running after a kill, probably blocked in the kernel"
        } else {
            "the worker did not exit in time (timeouts.stop)"
        };
        match reason {
            // Condemning the worker returns its requests to the queue, so that another worker can serve
            // them.
            ExitReason::Primary { why: cause, .. } => {
                self.kill(worker, ExitReason::Unneeded, why);
                self.act(Action::Condemn(worker));
                self.died(cause.unwrap_or_else(|| why.to_owned()));
            }
            ExitReason::Handover(outcome) if killed => {
                self.kill(worker, ExitReason::Unneeded, why);
                self.act(Action::Requeue(worker));
                self.finish(outcome);
            }
            reason => self.kill(worker, reason, why),
        }
    }

    pub(super) fn exited(&mut self, worker: WorkerId, status: String, idle: bool) {
        let Some(slot) = self.processes.remove(worker) else { return };
        match slot.role {
            Role::Starting { purpose: StartPurpose::Reference | StartPurpose::Serve, .. } => {
                self.died(status)
            }
            Role::Starting { purpose: StartPurpose::Shadow, .. } => {
                self.finish(HandoverOutcome::Aborted(HandoverFailure::Died))
            }
            Role::Starting { purpose: StartPurpose::Standby, .. } | Role::Standby { .. } => {
                let cooldown = self.processes.standby.cooldown_after(&slot.role, self.now);
                self.standby_exited(cooldown, true);
            }
            Role::Serving { since } => self.lost(since, idle, status),
            Role::Draining { .. } => {
                self.act(Action::Requeue(worker));
                self.complete();
                self.finish(HandoverOutcome::Completed);
            }
            Role::Parked { .. } => self.finish(HandoverOutcome::Completed),
            Role::Exiting { reason, .. } => self.left(reason, status, idle),
        }
    }

    pub(super) fn left(&mut self, reason: ExitReason, status: String, idle: bool) {
        match reason {
            ExitReason::Primary { why, since } => {
                if let Some(since) = since {
                    self.processes.note_idle(self.now.since(since), idle);
                }
                self.died(why.unwrap_or(status));
            }
            ExitReason::Handover(outcome) => self.finish(outcome),
            ExitReason::Standby { cooldown, failed } => self.standby_exited(cooldown, failed),
            ExitReason::Unneeded => {}
        }
    }

    /// Handles the end of a lane. If another worker can serve, it takes the traffic over before this
    /// worker exits. A standby without a lane no longer counts as ready.
    pub(super) fn lane_ended(&mut self, worker: WorkerId, idle: bool) {
        match self.processes.role(worker).cloned() {
            Some(Role::Serving { since }) => {
                if self.processes.has_replacement() {
                    self.ends(worker, ExitReason::Unneeded);
                    self.lost(since, idle, "the worker closed its socket".to_owned());
                } else {
                    self.processes.note_idle(self.now.since(since), idle);
                    self.ends(worker, ExitReason::Primary { why: None, since: None });
                }
            }
            Some(Role::Draining { .. }) => {
                self.act(Action::Requeue(worker));
                self.complete();
                self.ends(worker, ExitReason::Handover(HandoverOutcome::Completed));
            }
            Some(Role::Parked { .. }) => {
                self.ends(worker, ExitReason::Unneeded);
                self.finish(HandoverOutcome::Completed);
            }
            Some(role @ Role::Standby { .. }) => {
                let cooldown = self.processes.standby.cooldown_after(&role, self.now);
                self.dismiss(worker, ExitReason::Standby { cooldown, failed: true });
            }
            _ => {}
        }
    }

    /// Kills a worker. If another worker can serve instead, it takes the traffic over before the killed
    /// worker exits.
    pub(super) fn misbehaved(&mut self, worker: WorkerId, why: &str) {
        let primary = |since| ExitReason::Primary { why: Some(why.to_owned()), since };
        match self.processes.role(worker).cloned() {
            Some(Role::Starting { purpose: StartPurpose::Shadow, .. }) => {
                self.give_up_shadow(worker, HandoverFailure::Misbehaved(why.to_owned()), why);
            }
            Some(Role::Starting { purpose: StartPurpose::Standby, .. } | Role::Standby { .. }) => {
                self.fail_standby(worker, why);
            }
            Some(Role::Starting { purpose: StartPurpose::Reference | StartPurpose::Serve, .. }) => {
                self.kill(worker, primary(None), why);
            }
            Some(Role::Serving { .. }) if self.processes.fallback().is_some() => {
                self.act(Action::Condemn(worker));
                let outcome = self.take_back(HandoverFailure::Misbehaved(why.to_owned()));
                self.kill(worker, ExitReason::Handover(outcome), why);
            }
            Some(Role::Serving { .. }) if self.processes.has_replacement() => {
                self.act(Action::Condemn(worker));
                self.kill(worker, ExitReason::Unneeded, why);
                self.died(why.to_owned());
            }
            Some(Role::Serving { since }) => self.kill(worker, primary(Some(since)), why),
            // Traffic must not return to a misbehaving incumbent.
            Some(Role::Draining { .. }) => {
                self.act(Action::Condemn(worker));
                self.complete();
                self.kill(worker, ExitReason::Handover(HandoverOutcome::Completed), why);
            }
            Some(Role::Parked { .. }) => {
                self.kill(worker, ExitReason::Handover(HandoverOutcome::Completed), why)
            }
            Some(Role::Exiting { reason, .. }) => self.kill(worker, reason, why),
            None => {}
        }
    }
}
