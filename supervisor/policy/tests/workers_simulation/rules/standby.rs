//! Rules about the standby. A standby must exist if the model should have one. Other models that need
//! the standby's memory must be informed about the standby.

use std::time::Duration;

use shadowslice_policy::workers::{
    Action, Launch, LifecycleEvent, StartFailure, WorkerPhase, WorkerRole, Workers, WorkersState,
};
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::Timestamp;

use super::{RuleChecker, Step, Stimulus, Violation, awaits, rule};

const SECOND: Duration = Duration::from_secs(1);

/// The maximum delay after failures, the minimum delay after a standby was revoked, and the age at
/// which a standby's earlier failures no longer count.
const MAX_BACKOFF: Duration = Duration::from_secs(60);
const REVOKED_COOLDOWN: Duration = Duration::from_secs(10);
const STABLE_AFTER: Duration = Duration::from_secs(10);

/// The state of the standby according to the rules.
#[derive(Default)]
pub(super) struct StandbyRules {
    /// True if the state machine has reported a standby to other models.
    pub(super) on: bool,
    failures: u32,
    /// The time before which the next standby must not start.
    not_before: Timestamp,
    /// The time from which the next standby could have started.
    could_start: Option<Timestamp>,
}

impl StandbyRules {
    pub(super) fn taken(&mut self) {
        self.failures = 0;
        self.not_before = Timestamp::default();
    }

    fn fails(&mut self) -> Duration {
        self.failures += 1;
        (SECOND * 2_u32.pow(self.failures.min(7) - 1)).min(MAX_BACKOFF)
    }
}

fn is_standby(workers: &Workers, worker: WorkerId) -> bool {
    workers.role_and_phase(worker).0 == WorkerRole::Standby
}

impl RuleChecker {
    pub(super) fn standby_before(&mut self, step: &Step<'_>) -> Result<(), Violation> {
        let Stimulus::LifecycleEvent(fact) = step.stimulus else { return Ok(()) };
        if let LifecycleEvent::StandbyRevoked(_) = fact {
            for seen in self
                .workers
                .values_mut()
                .filter(|seen| seen.role == Some(WorkerRole::Standby) && !seen.leaves())
            {
                seen.rest = REVOKED_COOLDOWN;
                seen.hurried = true;
            }
            return Ok(());
        }
        let (worker, exits) = match fact {
            LifecycleEvent::NotStarted { worker, .. } | LifecycleEvent::Exited { worker, .. } => {
                (*worker, true)
            }
            LifecycleEvent::Refused { worker, .. } | LifecycleEvent::Misbehaved { worker, .. } => {
                (*worker, false)
            }
            LifecycleEvent::LaneEnded { worker, .. } => (*worker, false),
            _ => return Ok(()),
        };
        let Some(seen) = self.workers.get_mut(&worker).filter(|seen| seen.role == Some(WorkerRole::Standby))
        else {
            return Ok(());
        };
        let left_before = seen.failed || seen.told_to_end.is_some() || seen.killed.is_some();
        let ready = seen.standby_since.is_some();
        let ends = match fact {
            LifecycleEvent::Refused { .. } => !seen.attached,
            LifecycleEvent::LaneEnded { .. } => ready,
            _ => true,
        };
        if ends && !left_before {
            if seen.standby_since.is_some_and(|since| step.now.since(since) >= STABLE_AFTER) {
                self.standby.failures = 0;
            }
            seen.failed = true;
            seen.rest = match fact {
                LifecycleEvent::NotStarted { failure: StartFailure::NoRoomForStandby(_), .. } => SECOND,
                _ => self.standby.fails(),
            };
        }
        let rest = seen.rest;
        if exits {
            self.standby.not_before = step.now + rest;
        }
        Ok(())
    }

    pub(super) fn standby_starts(&mut self, launch: &Launch, step: &Step<'_>) -> Result<(), Violation> {
        rule(self.settings.standby, "a standby starts only if one is wanted")?;
        rule(self.serving().is_some(), "a standby starts only beside a worker that serves")?;
        let changes = step.workers.handover_phase().is_some();
        rule(!changes, "a standby does not start during a change")?;
        let inside = step.workers.partition().is_some();
        rule(inside || launch.share == step.workers.share(), "a standby starts at the share in force")?;
        rule(step.now >= self.standby.not_before, "a standby starts after its delay")
    }

    pub(super) fn keep(&mut self, worker: WorkerId, step: &Step<'_>) -> Result<(), Violation> {
        let dwelt = matches!(step.stimulus, Stimulus::Timer { .. });
        self.note(if dwelt {
            "a parked worker becomes the standby"
        } else {
            "a parked worker becomes the standby for a change"
        });
        self.standby.on = true;
        let seen = self.seen(worker);
        rule(seen.is_usable() && seen.parked.is_some(), "only a drained worker becomes the standby")?;
        (seen.drains, seen.parked) = (None, None);
        seen.standby_since = Some(step.now);
        seen.rest = Duration::ZERO;
        Ok(())
    }

    /// Checks that a standby is ordered to exit only for a valid reason.
    pub(super) fn standby_stops(
        &mut self,
        worker: WorkerId,
        allowed: bool,
        step: &Step<'_>,
    ) -> Result<(), Violation> {
        let dwell = self.settings.timeouts.dwell.max(SECOND);
        let wanted = self.settings.standby;
        let inside = step.workers.partition().is_some();
        let kept = step.actions.iter().any(|action| matches!(action, Action::Keep(_)));
        let called_in = matches!(step.stimulus, Stimulus::LifecycleEvent(LifecycleEvent::StandbyRevoked(_)));
        let Some(seen) = self
            .workers
            .get(&worker)
            .filter(|seen| seen.role == Some(WorkerRole::Standby) && seen.is_usable())
        else {
            return Ok(());
        };
        let fits = seen.fits(step.workers.share(), &self.settings, inside);
        let dwelt = seen.standby_since.is_some_and(|since| step.now >= since + dwell);
        let goes = !(wanted && fits) && dwelt;
        rule(allowed || kept || called_in || goes, "a wanted standby stays")
    }

    /// Records a standby whose start exceeded its time limit.
    pub(super) fn standby_too_slow(&mut self, worker: WorkerId) {
        let rest = self.standby.fails();
        let seen = self.seen(worker);
        (seen.failed, seen.rest) = (true, rest);
    }

    /// Records the roles that status reports show.
    pub(super) fn roles(&mut self, step: &Step<'_>) {
        for (worker, seen) in &mut self.workers {
            let (role, phase) = step.workers.role_and_phase(*worker);
            seen.role = Some(role);
            if (role, phase) == (WorkerRole::Standby, WorkerPhase::Standing) {
                seen.standby_since.get_or_insert(step.now);
            }
        }
    }

    pub(super) fn memory_is_told(&mut self, step: &Step<'_>) -> Result<(), Violation> {
        let unwanted = (!self.settings.standby).then_some(self.settings.timeouts.dwell.max(SECOND));
        let in_vain = |action: &Action| match action {
            Action::Stop(worker) => Some(*worker),
            _ => None,
        };
        for worker in step.actions.iter().filter_map(in_vain) {
            if let (Some(rest), Some(seen)) = (unwanted, self.workers.get_mut(&worker))
                && !seen.warm
            {
                seen.rest = seen.rest.max(rest);
            }
        }
        if self.stopping {
            return Ok(());
        }
        let standby = |worker: &WorkerId| is_standby(step.workers, *worker);
        let any = self.workers.iter().any(|(worker, seen)| !seen.gone && standby(worker));
        rule(!self.standby.on || any, "a standby is reported only while one exists")?;
        let counts = self.workers.iter().filter(|(worker, seen)| !seen.leaves() && standby(worker));
        let counts = counts.filter(|(_, seen)| seen.standby_since.is_some() || !seen.hurried).count();
        rule(self.standby.on || counts == 0, "an existing standby is reported")?;
        rule(!awaits(step.workers) || !self.standby.on, "an awaited worker is not revoked")?;
        let stands = self.workers.values().any(|seen| seen.standby_since.is_some() && seen.is_usable());
        let obstacle = step.workers.standby_obstacle().is_some();
        rule(!obstacle || !stands, "a ready standby has no obstacle")?;
        self.standby_has_the_right_share(step)?;
        self.one_starts_in_time(step, any)
    }

    fn standby_has_the_right_share(&mut self, step: &Step<'_>) -> Result<(), Violation> {
        let dwell = self.settings.timeouts.dwell.max(SECOND) + self.allowance;
        let busy = step.workers.handover_phase().is_some() || step.workers.coming().is_some();
        let inside = step.workers.partition().is_some();
        for seen in
            self.workers.values_mut().filter(|seen| seen.role == Some(WorkerRole::Standby) && !seen.leaves())
        {
            let Some(since) = seen.standby_since else { continue };
            let wanted = self.settings.standby;
            let fits = seen.fits(step.workers.share(), &self.settings, inside);
            if busy || (wanted && fits) {
                seen.unwanted = None;
                continue;
            }
            let unwanted = *seen.unwanted.get_or_insert(step.now);
            let by = (since + dwell).max(unwanted + self.allowance);
            rule(step.now <= by, "a standby at another share exits")?;
        }
        Ok(())
    }

    fn one_starts_in_time(&mut self, step: &Step<'_>, any: bool) -> Result<(), Violation> {
        // A standby may also start during a change inside the worker.
        let changes = step.workers.coming().is_some() && step.workers.partition().is_none();
        let settled = step.workers.handover_phase().is_none() && !changes;
        let could = self.settings.standby && !any && settled && step.workers.state() == WorkersState::Ready;
        if !could {
            self.standby.could_start = None;
            return Ok(());
        }
        let since = *self.standby.could_start.get_or_insert(step.now);
        let by = since.max(self.standby.not_before) + self.allowance;
        rule(step.now <= by, "a standby starts when it can")
    }
}
