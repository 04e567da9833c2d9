//! Rules about the share in force. The share must be reported correctly, and the serving worker must
//! have this share.

use shadowslice_policy::workers::{
    Action, ChangeMechanism, ChangeReport, Failover, LifecycleEvent, ResizeRefused, ResizeRequest, Settings,
};
use shadowslice_shared::boot::WorkerPurpose;
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::{Percent, Sms};

use super::record::WorkerRecord;
use super::{RuleChecker, Step, Stimulus, Violation, rule};

/// The shares of the model, derived from the actions.
pub(super) struct Shares {
    in_force: Percent,
    /// The last hand-over that completed.
    pub(super) last: Option<ChangeReport>,
    /// The share before the last order to start a model that was down.
    before_revival: Percent,
    /// True from such an order until its outcome.
    reviving: bool,
    /// True if a death caused the stall measurement that starts in this step. This is `None` if no
    /// measurement starts.
    pub(super) stall: Option<bool>,
    /// The worker whose first batch is awaited, with the request that caused it.
    pub(super) awaited: Option<(WorkerId, Option<ResizeRequest>)>,
    shadow: Option<WorkerId>,
}

impl Shares {
    pub(super) fn new(share: Percent) -> Self {
        Self {
            in_force: share,
            last: None,
            before_revival: share,
            reviving: false,
            stall: None,
            awaited: None,
            shadow: None,
        }
    }

    /// Records that the incumbent took the traffic back.
    pub(super) fn taken_back(&mut self) {
        if let Some(last) = &self.last {
            self.in_force = last.from;
        }
    }

    fn revives(&mut self) {
        self.before_revival = self.in_force;
        self.reviving = true;
    }

    pub(super) fn aborted(&mut self, why: &ResizeRefused) {
        let failed = matches!(why, ResizeRefused::NotServing { .. });
        if std::mem::take(&mut self.reviving) && failed {
            self.in_force = self.before_revival;
        }
    }
}

/// Returns the number of SMs of a worker with this share.
pub(super) fn sms_of(settings: &Settings, share: Percent) -> Sms {
    settings.sms[share.get() as usize - 1]
}

impl RuleChecker {
    /// Records that a shadow restores the share, because the serving worker has the whole GPU instead.
    pub(super) fn brought_back(&mut self, share: Percent) -> Result<(), Violation> {
        rule(share == self.shares.in_force, "the restored share was in force")?;
        self.shares.in_force = Percent::WHOLE;
        Ok(())
    }

    pub(super) fn await_effect(&mut self, worker: WorkerId, request: Option<ResizeRequest>) {
        self.shares.awaited = Some((worker, request));
        if request.is_some() && request == self.answers.begun() {
            self.shares.shadow = Some(worker);
        }
    }

    pub(super) fn in_force(&mut self, change: &ChangeReport) -> Result<(), Violation> {
        let request = change.request;
        let from = if change.mechanism == ChangeMechanism::Revive {
            self.shares.before_revival
        } else {
            self.shares.in_force
        };
        rule(change.from == from, "a change is reported with the former share")?;
        self.shares.in_force = request.share;
        self.shares.reviving &= change.mechanism != ChangeMechanism::Revive;
        let ChangeMechanism::Shadow { .. } = change.mechanism else {
            let awaited = self.shares.awaited.map(|(worker, request)| (Some(worker), request));
            let effect = awaited == Some((self.routed, Some(request)));
            return rule(
                effect || change.mechanism == ChangeMechanism::Revive,
                "the first batch after a change is awaited",
            );
        };
        self.shares.last = Some(*change);
        let awaited = self.shares.shadow == self.routed && self.routed.is_some();
        rule(awaited, "the first batch of a shadow is awaited")?;
        let share = self.routed.and_then(|routed| self.workers.get(&routed)).map(WorkerRecord::share);
        let served = share.map(|share| sms_of(&self.settings, share));
        rule(served == Some(sms_of(&self.settings, request.share)), "the shadow has the share of its request")
    }

    pub(super) fn rolled_back(&mut self, change: &ChangeReport) -> Result<(), Violation> {
        rule(self.shares.last.take() == Some(*change), "only a completed hand-over is rolled back")
    }

    pub(super) fn failed_over(&mut self, failover: &Failover) -> Result<(), Violation> {
        self.note("a standby replaces a dead worker");
        rule(self.shares.stall == Some(true), "the stall after a death is measured from the death")?;
        rule(self.routed == Some(failover.worker), "the worker that takes over has the traffic")?;
        rule(
            self.shares.awaited == Some((failover.worker, None)),
            "the first batch of a standby is awaited",
        )?;
        rule(failover.shares.0 == self.shares.in_force, "a failover is reported with the former share")?;
        self.shares.in_force = failover.shares.1;
        rule(!self.shares.reviving, "a model that was down has no standby")?;
        Ok(())
    }

    /// Records that the model can no longer use partitions, and that its worker has the whole GPU.
    pub(super) fn needs_shadows(&mut self, step: &Step<'_>) -> Result<(), Violation> {
        rule(step.workers.partition().is_none(), "shadows are needed only without partitions")?;
        self.note("the model can have no partitions");
        self.partitions.moved_as = None;
        Ok(())
    }

    /// Checks that the reported share is in force, and that the serving worker has this share.
    pub(super) fn share_is_told(&mut self, step: &Step<'_>) -> Result<(), Violation> {
        for action in step.actions {
            if let Action::Start(launch) = action
                && !launch.low_priority
                && launch.purpose == WorkerPurpose::Serve
            {
                self.booted_at(launch.share, step)?;
            }
        }
        rule(step.workers.share() == self.shares.in_force, "the reported share is in force")?;
        let settled = self.answers.all_are_given() && step.workers.handover_phase().is_none();
        let Some(seen) = self.routed.and_then(|routed| self.workers.get(&routed)) else { return Ok(()) };
        let apart =
            step.workers.partition().is_none() && seen.is_usable() && self.answers.begun_at().is_none();
        let has = sms_of(&self.settings, seen.share());
        let told = sms_of(&self.settings, self.shares.in_force);
        rule(!settled || !apart || has == told, "the worker that serves has the share in force")
    }

    /// Records the start of a primary worker with this share.
    fn booted_at(&mut self, share: Percent, step: &Step<'_>) -> Result<(), Violation> {
        let by_hand = matches!(step.stimulus, Stimulus::LifecycleEvent(LifecycleEvent::Resize { .. }));
        if self.was_asleep && by_hand {
            self.shares.revives();
            self.shares.in_force = share;
        }
        if self.down {
            if matches!(step.stimulus, Stimulus::Timer { .. }) {
                self.note("a model that was given up restarts by itself");
            } else {
                self.shares.revives();
                self.note("a model that was given up restarts");
                rule(step.workers.failures_in_a_row() == 0, "a restarted model has no failures")?;
            }
            self.shares.in_force = share;
        }
        rule(share == self.shares.in_force, "a worker starts with the share in force")
    }

    pub(super) fn share(&self) -> Percent {
        self.shares.in_force
    }

    pub(super) fn serving(&self) -> Option<&WorkerRecord> {
        self.routed.and_then(|routed| self.workers.get(&routed)).filter(|seen| seen.is_usable())
    }
}
