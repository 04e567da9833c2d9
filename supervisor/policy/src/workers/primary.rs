//! The primary: the worker that serves, or the reason why no worker serves. This module handles the
//! first workers, deaths, and the replacement of dead workers.

use std::time::Duration;

use shadowslice_shared::boot::{BootRefusal, WarmUpReport, WorkerPurpose};
use shadowslice_shared::groups::Groups;
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::{Percent, Timestamp};

use super::Workers;
use super::change::{
    Failover, HandoverFailure, HandoverOutcome, OngoingChange, ResizeRefused, WRONG_AT_A_SHARE,
};
use super::messages::{Action, LifecycleReport, StartFailure};
use super::slot::{ExitReason, Role, StartPurpose};

/// The time between two attempts to start a worker on a GPU that accepts no worker at present.
const GPU_RETRY_INTERVAL: Duration = Duration::from_millis(200);

/// The number of workers that must answer wrongly at a share before the share counts as the cause.
const MAX_WRONG_ANSWERS: u32 = 2;

/// The worker that serves, or the reason why no worker serves.
#[derive(Debug)]
pub(super) enum Primary {
    /// A worker that serves or is starting. The worker's role distinguishes the two cases.
    Worker(WorkerId),
    /// The model starts the next worker after a delay.
    BackingOff { until: Timestamp },
    /// The standby is still starting and will serve. If the start of the standby fails, another worker
    /// starts, but not before `back_off`.
    AwaitingStandby { back_off: Timestamp, why: String },
    /// The GPU accepts no worker at present. The model tries to start another worker at `until`.
    Waiting { until: Timestamp, why: String },
    /// The model sleeps without a worker, and accepts requests. The next worker starts when one arrives.
    Asleep,
    /// The model refuses requests. If `again` is `None`, no worker starts until the configuration or
    /// the model's files change, or until an operator or a client acts.
    Down { why: String, again: Option<Timestamp> },
}

impl Primary {
    pub(super) fn due(&self) -> Option<Timestamp> {
        match self {
            Self::BackingOff { until } | Self::Waiting { until, .. } => Some(*until),
            Self::Down { again, .. } => *again,
            Self::Worker(_) | Self::AwaitingStandby { .. } | Self::Asleep => None,
        }
    }

    pub(super) fn worker(&self) -> Option<WorkerId> {
        if let Self::Worker(worker) = self { Some(*worker) } else { None }
    }
}

impl Workers {
    /// Starts a worker that serves. If there are no reference answers yet, first starts the worker that
    /// writes them.
    pub(super) fn boot(&mut self) {
        let purpose =
            if self.processes.reference.is_some() { StartPurpose::Reference } else { StartPurpose::Serve };
        let worker = self.start(purpose, self.share, self.now + self.settings.timeouts.spawn);
        self.processes.primary = Primary::Worker(worker);
    }

    pub(super) fn primary_on_time(&mut self) {
        if self.processes.primary.due().is_some_and(|due| due <= self.now) {
            self.boot();
        }
    }

    pub(super) fn wait_ended(&mut self) {
        if matches!(self.processes.primary, Primary::Waiting { .. }) {
            self.boot();
        }
    }

    /// Ends the serving worker, because the model sleeps. Does nothing if the model has another worker or
    /// is changing its share.
    pub(super) fn sleep(&mut self, worker: WorkerId) {
        let is_alone = self.processes.serving() == Some(worker) && self.processes.all().len() == 1;
        if !is_alone || self.change.is_some() || self.next.is_some() {
            return self.act(Action::StayAwake(worker));
        }
        self.dismiss(worker, ExitReason::Unneeded);
        self.processes.primary = Primary::Asleep;
    }

    pub(super) fn wake(&mut self) {
        if matches!(self.processes.primary, Primary::Asleep) {
            self.boot();
        }
    }

    pub(super) fn not_started(&mut self, worker: WorkerId, failure: StartFailure) {
        let Some(slot) = self.processes.remove(worker) else { return };
        let (purpose, until) = match slot.role {
            Role::Starting { purpose, until, .. } => (purpose, until),
            // The worker was ordered to exit before this event arrived.
            Role::Exiting { reason, .. } => return self.left(reason, failure.why(), false),
            _ => return,
        };
        match purpose {
            StartPurpose::Reference | StartPurpose::Serve => match failure {
                StartFailure::Passing { why, .. } => {
                    self.processes.primary = Primary::Waiting { until: self.now + GPU_RETRY_INTERVAL, why };
                }
                // A failed start does not count as a death.
                StartFailure::Failed(why) | StartFailure::NoRoomForStandby(why) => self.retry(why),
            },
            StartPurpose::Shadow => self.no_shadow(failure, until),
            StartPurpose::Standby => self.standby_not_started(failure),
        }
    }

    pub(super) fn reference_written(&mut self, worker: WorkerId, result: Result<(), String>) {
        if !self.processes.role(worker).is_some_and(|role| role.starts_as(StartPurpose::Reference)) {
            return;
        }
        match result {
            Ok(()) => {
                self.processes.reference = None;
                self.dismiss(worker, ExitReason::Unneeded);
                self.boot();
            }
            // The supervisor could not keep the answers. The model is not to blame, so the start is
            // retried.
            Err(why) => self.dismiss(worker, ExitReason::Primary { why: Some(why), since: None }),
        }
    }

    pub(super) fn warmed(&mut self, worker: WorkerId, warmed: &WarmUpReport, asked: Option<Groups>) {
        let Some(Role::Starting { purpose, .. }) = self.processes.role(worker).cloned() else { return };
        self.attach(worker, warmed, asked);
        match purpose {
            StartPurpose::Reference => {}
            StartPurpose::Serve => {
                self.serve_with(worker);
                self.revived();
            }
            StartPurpose::Shadow => self.cut_over(worker),
            StartPurpose::Standby => self.becomes_standby(worker),
        }
    }

    pub(super) fn serve_with(&mut self, worker: WorkerId) {
        self.processes.becomes(worker, Role::Serving { since: self.now });
        self.processes.primary = Primary::Worker(worker);
        self.serves_on(worker);
        self.act(Action::Route(worker));
    }

    /// Handles a worker that refuses to start. Until the reference answers exist, most refusals are
    /// faults of the model and therefore final. A later refusal may be temporary, for example because
    /// of low memory. Such a refusal counts as a death.
    pub(super) fn refused(&mut self, worker: WorkerId, refusal: &BootRefusal) {
        let Some(Role::Starting { purpose, .. }) = self.processes.role(worker).cloned() else { return };
        let why = refusal.to_string();
        match purpose {
            StartPurpose::Reference | StartPurpose::Serve => self.primary_refused(worker, refusal, why),
            StartPurpose::Shadow => {
                let share = self.processes.slot(worker).map(|slot| slot.share);
                if let (BootRefusal::Proof { .. }, Some(share)) = (refusal, share) {
                    self.answers_wrongly(share);
                }
                self.give_up_shadow(worker, HandoverFailure::BootFailed(why.clone()), &why);
            }
            StartPurpose::Standby => {
                let cooldown = self.processes.standby.record_failure();
                self.ends(worker, ExitReason::Standby { cooldown, failed: true });
                self.processes.standby.obstacle = Some(why);
            }
        }
    }

    fn primary_refused(&mut self, worker: WorkerId, refusal: &BootRefusal, why: String) {
        match refusal {
            // This refusal does not count as a death, and another worker starts immediately.
            BootRefusal::NoPartitions(_) => {
                self.ends(worker, ExitReason::Unneeded);
                self.leave_partitions(&why);
                if !matches!(self.processes.primary, Primary::Down { .. }) {
                    self.boot();
                }
            }
            BootRefusal::NoOperator(_)
                if self.processes.reference == Some(WorkerPurpose::Reference) && self.settings.on_gpu =>
            {
                self.ends(worker, ExitReason::Unneeded);
                self.processes.reference = Some(WorkerPurpose::DeviceReference);
                self.boot();
            }
            BootRefusal::Proof { .. } if self.answers_wrongly(self.share) => {
                self.down(format!("{why}. {WRONG_AT_A_SHARE}"));
            }
            BootRefusal::Library(_) | BootRefusal::Setup(_) | BootRefusal::OtherForm(_) => {
                self.ends(worker, ExitReason::Primary { why: Some(why), since: None })
            }
            _ if self.processes.reference.is_none() => {
                self.ends(worker, ExitReason::Primary { why: Some(why), since: None })
            }
            _ => self.down(why),
        }
    }

    /// Counts the workers with wrong answers at a share. Returns true if the number has reached
    /// [`MAX_WRONG_ANSWERS`]. A worker that may use the whole GPU does not count, because its share
    /// cannot be the cause.
    fn answers_wrongly(&mut self, share: Percent) -> bool {
        if share == Percent::WHOLE || self.relocator.is_ok() {
            return false;
        }
        let times = self.wrong_at.entry(self.settings.sms_of(share)).or_default();
        *times += 1;
        *times >= MAX_WRONG_ANSWERS
    }

    pub(super) fn is_wrong_at(&self, share: Percent) -> bool {
        self.wrong_at.get(&self.sms(share)).is_some_and(|&times| times >= MAX_WRONG_ANSWERS)
    }

    /// Handles the death of the serving worker.
    pub(super) fn lost(&mut self, since: Timestamp, idle: bool, why: String) {
        if self.processes.fallback().is_some() {
            let outcome = self.take_back(HandoverFailure::Died);
            return self.finish(outcome);
        }
        self.processes.note_idle(self.now.since(since), idle);
        self.died(why);
    }

    pub(super) fn died(&mut self, why: String) {
        self.processes.record_death(&why);
        self.retry(why);
    }

    /// Replaces a dead worker by the standby, or by a new worker after a delay. After too many
    /// failures, the model refuses requests until the new worker is warm.
    fn retry(&mut self, why: String) {
        let retry = self.processes.restarts.record_failure();
        let again = self.now + retry.after;
        if let Some(failures) = retry.unready {
            let why = format!(
                "{failures} workers in a row did not start or died before an answer; the last worker: {why}"
            );
            self.processes.restarted += 1;
            return self.down_until(Some(again), why);
        }
        if !self.fail_over(&why) && !self.await_standby(again, &why) {
            self.processes.restart_at(again);
        }
    }

    /// Moves the traffic to the standby, even if the standby has another share. Returns false if no
    /// standby is ready.
    fn fail_over(&mut self, why: &str) -> bool {
        let Some(worker) = self.take_standby() else { return false };
        let from = self.share;
        // If the share is a partition inside the worker, it does not change.
        if let (Some(slot), Err(_)) = (self.processes.slot(worker), &self.relocator) {
            self.share = slot.share;
        }
        self.act(Action::MeasureStall { outage: true });
        self.act(Action::AwaitEffect(worker, None));
        self.serve_with(worker);
        let sms = (self.sms(from), self.sms(self.share));
        let shares = (from, self.share);
        self.act(Action::Report(LifecycleReport::FailedOver(Failover {
            worker,
            why: why.to_owned(),
            shares,
            sms,
        })));
        true
    }

    /// Waits for a standby that is starting, even if the standby has another share. The wait is shorter
    /// than the start of a new worker. Returns false if no standby is starting.
    fn await_standby(&mut self, back_off: Timestamp, why: &str) -> bool {
        let Some(worker) = self.processes.starting_standby() else { return false };
        // An awaited worker no longer counts as a standby, and keeps its memory.
        self.act(Action::Hurry(worker));
        self.act(Action::StandbyExists(false));
        self.processes.primary = Primary::AwaitingStandby { back_off, why: why.to_owned() };
        true
    }

    /// Moves the traffic to an awaited standby when it is ready. If the standby has become the shadow
    /// of a hand-over, the hand-over moves the traffic.
    pub(super) fn update_awaited(&mut self) {
        let Primary::AwaitingStandby { back_off, why } = &self.processes.primary else { return };
        let (back_off, why) = (*back_off, why.clone());
        let comes = self
            .processes
            .starting_standby()
            .or(self.processes.find(|role| role.starts_as(StartPurpose::Shadow)));
        if !self.fail_over(&why) && comes.is_none() {
            self.processes.restart_at(back_off);
        }
    }

    pub(super) fn down(&mut self, why: String) {
        self.down_until(None, why);
    }

    fn down_until(&mut self, again: Option<Timestamp>, why: String) {
        if let Some(worker) = self.processes.primary.worker()
            && let Some(role) = self.processes.role(worker)
        {
            match role {
                Role::Exiting { killed, until, .. } => {
                    let (killed, until) = (*killed, *until);
                    self.processes
                        .becomes(worker, Role::Exiting { reason: ExitReason::Unneeded, killed, until });
                }
                _ => self.dismiss(worker, ExitReason::Unneeded),
            }
        }
        self.dismiss_standby(Duration::ZERO);
        self.act(Action::Shut(why.clone()));
        self.processes.primary = Primary::Down { why: why.clone(), again };
        let refused = ResizeRefused::NotServing { model: self.settings.model.clone(), why };
        self.revive_failed(&refused);
        self.repartition_failed(&refused);
    }

    pub(super) fn drained(&mut self, worker: WorkerId) {
        if let Some(Role::Draining { .. }) = self.processes.role(worker) {
            let until = self.now + self.settings.timeouts.dwell;
            self.processes.becomes(worker, Role::Parked { until });
            self.complete();
        }
    }

    /// Restores the former share, because the model could not start with the new share.
    fn revive_failed(&mut self, refused: &ResizeRefused) {
        let Some(&OngoingChange::Revive { request, from }) = self.change.as_ref() else { return };
        self.set_share(from);
        self.change = None;
        self.act(Action::Report(LifecycleReport::Aborted(request, refused.clone())));
    }

    /// Moves the traffic back to the incumbent, because the shadow failed while it was serving.
    pub(super) fn take_back(&mut self, reason: HandoverFailure) -> HandoverOutcome {
        let Some(incumbent) = self.processes.fallback() else { return HandoverOutcome::Aborted(reason) };
        let had_completed = matches!(self.processes.role(incumbent), Some(Role::Parked { .. }));
        if let Some(&OngoingChange::Handover { from, .. }) = self.change.as_ref() {
            self.set_share(from);
        }
        self.serve_with(incumbent);
        if had_completed { HandoverOutcome::RolledBack(reason) } else { HandoverOutcome::Aborted(reason) }
    }
}
