//! Rules about exits. A worker is ordered to exit or killed only for a valid reason, and no worker is
//! forgotten.

use shadowslice_policy::workers::{Action, LifecycleEvent, WorkerPhase, WorkerRole, WorkersState};
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::Timestamp;

use super::record::WorkerRecord;
use super::{RuleChecker, Step, Stimulus, Violation, rule};

/// The maximum number of workers without an order to exit. These are the primary worker, its
/// replacement or the worker that it replaced, and a standby.
const MOST: usize = 3;

impl RuleChecker {
    pub(super) fn stop(&mut self, worker: WorkerId, step: &Step<'_>) -> Result<(), Violation> {
        let shut = step.actions.iter().any(|action| matches!(action, Action::Shut(_)));
        let sleeps = *step.stimulus == Stimulus::LifecycleEvent(LifecycleEvent::Sleep(worker));
        let (routed, allowed) = (self.routed, shut || self.stopping || sleeps);
        let (stop, dwell) = (self.settings.timeouts.stop, self.settings.timeouts.dwell);
        self.standby_stops(worker, allowed, step)?;
        let seen = self.seen(worker);
        // A worker exits for a sleep only when it has answered all batches.
        seen.busy &= !sleeps;
        let bad = seen.misbehaved || seen.lane_ended.is_some();
        let may = allowed || bad || routed != Some(worker);
        rule(may, "the worker that has the traffic and behaves is not stopped")?;
        let asked = matches!(step.stimulus, Stimulus::LifecycleEvent(LifecycleEvent::Resize { .. }));
        let parked = seen.parked.filter(|_| seen.is_usable() && !allowed && !asked);
        let dwelt = parked.is_none_or(|since| step.now >= since + dwell);
        rule(dwelt, "the probation lasts for its dwell time")?;
        rule(allowed || bad || !seen.busy, "a worker that may have batches is not stopped")?;
        seen.told_to_end = Some(step.now);
        // A standby may notice the order only when it is warm.
        let in_vain = seen.launch.standby && !seen.warm;
        seen.ends_by = Some(if in_vain { seen.boot_by.max(step.now + stop) } else { step.now + stop });
        Ok(())
    }

    pub(super) fn kill(&mut self, worker: WorkerId, step: &Step<'_>) -> Result<(), Violation> {
        let (stop, now) = (self.settings.timeouts.stop, step.now);
        let shadow = self.answers.begun_at().is_some();
        let seen = self.seen(worker);
        let waited = |since: Option<Timestamp>| since.is_some_and(|since| now >= since + stop);
        // The time limit starts at the order to exit or at the kill. Without an order or a kill, the
        // time limit starts at the refusal or at the end of the lane.
        let ends = seen.told_to_end.max(seen.killed).or(seen.refused).or(seen.lane_ended);
        let hangs = seen.prepares.is_some_and(|(_, by)| now >= by);
        let given_up = shadow && seen.refused == Some(now) && !seen.launch.standby;
        let news = matches!(step.stimulus, Stimulus::LifecycleEvent(LifecycleEvent::Misbehaved { worker: told, .. }) if *told == worker);
        let slow = !seen.warm && !seen.leaves() && now >= seen.boot_by;
        let late = waited(ends) && !(seen.misbehaved && ends.is_none());
        seen.misbehaved |= hangs;
        seen.late |= late;
        rule(
            news || hangs || given_up || slow || late || taken_shadow(seen, now),
            "only a worker that misbehaves, takes too long or ignores its stop is killed",
        )?;
        if seen.killed.is_some() && !news {
            self.note("a worker survives its kill");
        } else if late {
            self.note("a worker ignores its stop");
        } else if slow {
            self.note("a worker starts too slowly");
        } else if hangs {
            self.note("a worker hangs while it prepares a partition");
        }
        if slow && self.seen(worker).role == Some(WorkerRole::Standby) && !self.seen(worker).failed {
            self.standby_too_slow(worker);
        }
        let seen = self.seen(worker);
        seen.outlives |= seen.killed.is_some() && late && !news;
        seen.killed = Some(now);
        Ok(())
    }

    pub(super) fn not_too_many(&mut self, step: &Step<'_>) -> Result<(), Violation> {
        let stay = self.workers.values().filter(|seen| !seen.leaves() && !seen.misbehaved).count();
        let most = MOST - usize::from(!self.may_have_standby);
        rule(stay <= most, "the number of workers is bounded")?;
        let standing = self.workers.iter().filter(|(worker, seen)| {
            !seen.leaves() && step.workers.role_and_phase(**worker).0 == WorkerRole::Standby
        });
        rule(standing.count() <= 1, "there is at most one standby")?;
        if stay == MOST {
            self.note("three workers");
        }
        let down = matches!(step.workers.state(), WorkersState::Down { .. });
        if down && !self.down {
            self.note("down");
        }
        Ok(())
    }

    /// Checks that no phase exceeds its time limit.
    pub(super) fn nothing_is_overdue(&mut self, step: &Step<'_>) -> Result<(), Violation> {
        let timeouts = self.settings.timeouts;
        for (worker, seen) in self.workers.iter().filter(|(_, seen)| !seen.gone) {
            let ends = seen.killed.map(|at| at + timeouts.stop).max(seen.ends_by);
            let by_itself = seen.refused.or(seen.lane_ended).map(|at| at + timeouts.stop);
            let drains = seen.drains.filter(|_| seen.parked.is_none()).map(|at| at + timeouts.drain);
            let parked = step.workers.role_and_phase(*worker) == (WorkerRole::Parked, WorkerPhase::Standing);
            let parked = seen.parked.filter(|_| parked).map(|at| at + timeouts.dwell);
            let boots = (!seen.warm).then_some(seen.boot_by);
            let due = ends.or(by_itself).or(drains).or(parked).or(boots);
            let stuck = seen.outlives && seen.busy && seen.lane_ended.is_none();
            rule(!stuck, "no request stays with a worker that survives its kill")?;
            rule(due.is_none_or(|due| step.now <= due + self.allowance), "every phase ends in its time")?;
        }
        Ok(())
    }
}

/// Returns true if a standby that became a shadow refused to start in this step. Such a standby is
/// given up like any other shadow.
fn taken_shadow(seen: &WorkerRecord, now: Timestamp) -> bool {
    seen.launch.standby && seen.refused == Some(now)
}
