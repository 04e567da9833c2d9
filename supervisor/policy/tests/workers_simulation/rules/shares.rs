//! The share in force: told as it is, and what the worker that serves really has.

use shadowslice_policy::workers::{
    Action, ChangeReport, Failover, Means, ResizeRefused, ResizeRequest, Settings,
};
use shadowslice_shared::boot::WorkerPurpose;
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::{Percent, Sms};

use super::seen::Seen;
use super::{Broken, Rules, Step, Told, rule};

/// Shares, as they follow from what was done.
pub(super) struct Shares {
    in_force: Percent,
    /// The last hand-over that completed.
    pub(super) last: Option<ChangeReport>,
    /// The share before a restart at another.
    before_restart: Percent,
    /// Whether the stall that is measured from this step on began with a death.
    pub(super) stall: Option<bool>,
    /// Whose first batch is waited for.
    pub(super) awaited: Option<(WorkerId, Option<ResizeRequest>)>,
    shadow: Option<WorkerId>,
}

impl Shares {
    pub(super) fn new(share: Percent) -> Self {
        Self { in_force: share, last: None, before_restart: share, stall: None, awaited: None, shadow: None }
    }

    /// The incumbent has the traffic again.
    pub(super) fn taken_back(&mut self) {
        if let Some(last) = &self.last {
            self.in_force = last.from;
        }
    }

    pub(super) fn restarts(&mut self) {
        self.before_restart = self.in_force;
    }

    pub(super) fn aborted(&mut self, why: &ResizeRefused) {
        if matches!(why, ResizeRefused::NoWorker { .. }) {
            self.in_force = self.before_restart;
        }
    }
}

/// The SMs of a worker with this share.
pub(super) fn sms_of(settings: &Settings, share: Percent) -> Sms {
    settings.sms[share.get() as usize - 1]
}

impl Rules {
    /// A shadow is to bring the share back that a worker with the whole GPU does not have.
    pub(super) fn brought_back(&mut self, share: Percent) -> Result<(), Broken> {
        rule(share == self.shares.in_force, "the share is brought back that was in force")?;
        self.shares.in_force = Percent::WHOLE;
        Ok(())
    }

    pub(super) fn await_effect(&mut self, worker: WorkerId, request: Option<ResizeRequest>) {
        self.shares.awaited = Some((worker, request));
        if request.is_some() && request == self.answers.begun() {
            self.shares.shadow = Some(worker);
        }
    }

    pub(super) fn in_force(&mut self, change: &ChangeReport) -> Result<(), Broken> {
        let request = change.request;
        let from =
            if change.means == Means::Restart { self.shares.before_restart } else { self.shares.in_force };
        rule(change.from == from, "a change is reported from the share before")?;
        self.shares.in_force = request.share;
        let Means::Shadow { .. } = change.means else {
            let awaited = self.shares.awaited.map(|(worker, request)| (Some(worker), request));
            let effect = awaited == Some((self.routed, Some(request)));
            return rule(
                effect || change.means == Means::Restart,
                "the first batch of a change is waited for",
            );
        };
        self.shares.last = Some(*change);
        let awaited = self.shares.shadow == self.routed && self.routed.is_some();
        rule(awaited, "the first batch of a shadow is waited for")?;
        let share = self.routed.and_then(|routed| self.workers.get(&routed)).map(Seen::share);
        let served = share.map(|share| sms_of(&self.settings, share));
        rule(served == Some(sms_of(&self.settings, request.share)), "the shadow has the share of its request")
    }

    pub(super) fn rolled_back(&mut self, change: &ChangeReport) -> Result<(), Broken> {
        rule(self.shares.last.take() == Some(*change), "what is rolled back is what completed")
    }

    pub(super) fn failed_over(&mut self, failover: &Failover) -> Result<(), Broken> {
        self.note("a standing worker serves in the place of a dead one");
        rule(self.shares.stall == Some(true), "the stall after a death is measured from the death")?;
        rule(self.routed == Some(failover.worker), "the worker that takes over has the traffic")?;
        rule(self.shares.awaited == Some((failover.worker, None)), "its first batch is waited for")?;
        rule(failover.shares.0 == self.shares.in_force, "a take-over is told with the share before")?;
        self.shares.in_force = failover.shares.1;
        Ok(())
    }

    /// A worker with a partition has the whole GPU when the model can have no partitions any more.
    pub(super) fn needs_shadows(&mut self, step: &Step<'_>) -> Result<(), Broken> {
        rule(step.workers.partition().is_none(), "shadows are needed where there are no partitions")?;
        self.note("the model can have no partitions");
        self.partitions.moved_as = None;
        Ok(())
    }

    /// The share that is shown is the one in force, and the worker that serves has it.
    pub(super) fn share_is_told(&mut self, step: &Step<'_>) -> Result<(), Broken> {
        for action in step.actions {
            if let Action::Start(launch) = action
                && !launch.spare
                && launch.purpose == WorkerPurpose::Serve
            {
                self.booted_at(launch.share, step)?;
            }
        }
        rule(step.workers.share() == self.shares.in_force, "the share that is shown is in force")?;
        let changes = self.restarts || step.workers.handover_phase().is_some();
        let settled = self.answers.all_are_given() && !changes;
        let Some(seen) = self.routed.and_then(|routed| self.workers.get(&routed)) else { return Ok(()) };
        let apart =
            step.workers.partition().is_none() && seen.is_usable() && self.answers.begun_at().is_none();
        let has = sms_of(&self.settings, seen.share());
        let told = sms_of(&self.settings, self.shares.in_force);
        rule(!settled || !apart || has == told, "the worker that serves has the share in force")
    }

    /// A worker was started that is to serve, with this share.
    fn booted_at(&mut self, share: Percent, step: &Step<'_>) -> Result<(), Broken> {
        if self.restarts || self.down {
            if self.down && matches!(step.told, Told::Timer { .. }) {
                self.note("a model that was given up is tried again by itself");
            } else if self.down {
                self.shares.restarts();
                self.note("a model that was given up is tried again");
                rule(step.workers.failures_in_a_row() == 0, "a model that is tried again has all its tries")?;
            }
            self.shares.in_force = share;
        }
        rule(share == self.shares.in_force, "a worker starts with the share in force")
    }

    pub(super) fn share(&self) -> Percent {
        self.shares.in_force
    }

    pub(super) fn serving(&self) -> Option<&Seen> {
        self.routed.and_then(|routed| self.workers.get(&routed)).filter(|seen| seen.is_usable())
    }
}
