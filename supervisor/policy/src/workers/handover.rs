//! A hand-over: traffic moves from the incumbent to a shadow with another share.
//!
//! | phase | what happens |
//! |---|---|
//! | Spawning, Warming | the shadow starts; the incumbent serves unchanged |
//! | Draining | after the cut-over, the shadow serves and the incumbent finishes its batches |
//! | Probation | the share is in force; the incumbent is parked and can take the traffic back |
//! | Retiring | the incumbent exits and frees its memory |
//! | Aborting | the shadow exits; the incumbent serves |
//!
//! A hand-over has no probation if the incumbent cannot take the traffic back. This is the case if the
//! incumbent does not serve when the shadow becomes warm, or if the incumbent dies, hangs or takes too
//! long while it drains.

use std::time::Duration;

use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::Timestamp;

use super::Workers;
use super::change::{
    ChangeMechanism, ChangeReport, HandoverFailure, HandoverOutcome, MemoryRetry, OngoingChange,
};
use super::messages::{Action, LifecycleReport, ResizeRequest, StartFailure};
use super::slot::{ExitReason, Role, StartPurpose};

/// The time between two attempts to start a shadow, while other workers free memory for the shadow.
const MEMORY_RETRY_INTERVAL: Duration = Duration::from_millis(200);

impl Workers {
    /// Starts a hand-over. If `shadow` is already running, the caller sets its role.
    pub(super) fn begin_handover(&mut self, request: ResizeRequest, shadow: Option<WorkerId>) {
        let at_once =
            shadow.is_some_and(|shadow| matches!(self.processes.role(shadow), Some(Role::Standby { .. })));
        self.act(Action::MeasureStall { outage: false });
        self.act(Action::Report(LifecycleReport::Begun(request, shadow)));
        self.change = Some(OngoingChange::Handover { request, from: self.share, at_once, retry: None });
        match shadow {
            Some(shadow) => self.act(Action::AwaitEffect(shadow, Some(request))),
            None => self.start_shadow(request, self.now + self.settings.timeouts.spawn),
        }
    }

    fn start_shadow(&mut self, request: ResizeRequest, until: Timestamp) {
        let shadow = self.start(StartPurpose::Shadow, request.share, until);
        self.act(Action::AwaitEffect(shadow, Some(request)));
    }

    /// Handles a shadow that did not start. If standbys of other models are exiting to free memory, the
    /// start is retried while more than half of its time limit is left.
    pub(super) fn no_shadow(&mut self, failure: StartFailure, until: Timestamp) {
        let at = self.now + MEMORY_RETRY_INTERVAL;
        let in_time = at + self.settings.timeouts.spawn / 2 < until;
        match (failure, &mut self.change) {
            (
                StartFailure::Passing { memory_expected: true, .. },
                Some(OngoingChange::Handover { retry, .. }),
            ) if in_time => {
                *retry = Some(MemoryRetry { at, until });
            }
            (
                StartFailure::Passing { why, .. }
                | StartFailure::NoRoomForStandby(why)
                | StartFailure::Failed(why),
                _,
            ) => self.finish(HandoverOutcome::Aborted(HandoverFailure::BootFailed(why))),
        }
    }

    pub(super) fn retry_due(&self) -> Option<Timestamp> {
        match &self.change {
            Some(OngoingChange::Handover { retry, .. }) => retry.map(|retry| retry.at),
            _ => None,
        }
    }

    pub(super) fn retry_on_time(&mut self) {
        let now = self.now;
        if let Some(OngoingChange::Handover { retry, request, .. }) = &mut self.change
            && let Some(MemoryRetry { until, .. }) = retry.take_if(|retry| retry.at <= now)
        {
            let request = *request;
            self.start_shadow(request, until);
        }
    }

    /// Kills a shadow that has not served. The hand-over ends when the shadow has exited.
    pub(super) fn give_up_shadow(&mut self, shadow: WorkerId, reason: HandoverFailure, why: &str) {
        self.kill(shadow, ExitReason::Handover(HandoverOutcome::Aborted(reason)), why);
    }

    pub(super) fn cut_over(&mut self, shadow: WorkerId) {
        let share = self.share;
        if let Some(OngoingChange::Handover { from, .. }) = &mut self.change {
            *from = share;
        }
        let (serving, before) = (self.processes.serving(), self.processes.primary.worker());
        if let Some(incumbent) = serving {
            let until = self.now + self.settings.timeouts.drain;
            self.processes.becomes(incumbent, Role::Draining { until });
            self.serve_with(shadow);
            self.act(Action::Drain(incumbent));
            return;
        }
        self.serve_with(shadow);
        self.complete();
        let before = before.and_then(|worker| Some((worker, self.processes.role(worker)?.clone())));
        match before {
            // The requests of this worker return to the queue when it exits.
            Some((worker, Role::Exiting { killed, until, .. })) => {
                let reason = ExitReason::Handover(HandoverOutcome::Completed);
                self.processes.becomes(worker, Role::Exiting { reason, killed, until });
            }
            Some((worker, _)) => self.retire(worker),
            None => self.finish(HandoverOutcome::Completed),
        }
    }

    pub(super) fn retire(&mut self, incumbent: WorkerId) {
        self.dismiss(incumbent, ExitReason::Handover(HandoverOutcome::Completed));
    }

    pub(super) fn drains_too_long(&mut self, incumbent: WorkerId) {
        self.act(Action::Requeue(incumbent));
        self.complete();
        self.retire(incumbent);
    }

    /// Retires the parked incumbent, because a newer request needs its memory.
    pub(super) fn reclaim(&mut self) {
        if let Some(parked) = self.processes.parked() {
            self.retire(parked);
        }
    }

    /// Ends the probation, or the wait for the incumbent's exit, so that the next request can start
    /// immediately. The next request uses a worker that is already running or starting.
    pub(super) fn cut_short(&mut self, next: &ResizeRequest) {
        if let Some(parked) = self.processes.parked() {
            let another = self.processes.ready().is_some_and(|ready| self.fits(ready, next.share));
            if self.fits(parked, next.share) && !another {
                self.keep(parked);
            } else {
                self.dismiss(parked, ExitReason::Unneeded);
            }
            return self.finish(HandoverOutcome::Completed);
        }
        if self.processes.release_incumbent() {
            self.finish(HandoverOutcome::Completed);
        }
    }

    pub(super) fn complete(&mut self) {
        let Some(report) = self.handover_report() else { return };
        self.set_share(report.request.share);
        self.act(Action::Report(LifecycleReport::Completed(report)));
    }

    pub(super) fn finish(&mut self, outcome: HandoverOutcome) {
        let Some(change) = self.handover_report() else { return };
        self.change = None;
        let (rolled_back, reason) = match outcome {
            HandoverOutcome::Completed => return,
            HandoverOutcome::RolledBack(reason) => (true, reason),
            HandoverOutcome::Aborted(reason) => (false, reason),
        };
        // The exit of a rolled-back shadow counts as a death, because the shadow had served.
        self.processes.deaths += u64::from(rolled_back);
        self.set_share(self.share);
        self.act(Action::Report(LifecycleReport::HandoverFailed { change, rolled_back, reason }));
    }

    fn handover_report(&self) -> Option<ChangeReport> {
        let Some(&OngoingChange::Handover { request, from, at_once, .. }) = self.change.as_ref() else {
            return None;
        };
        let sms = (self.sms(from), self.sms(request.share));
        Some(ChangeReport { request, from, mechanism: ChangeMechanism::Shadow { at_once }, sms })
    }
}
