//! Rules about refused requests for a new share, and about the mechanism that accepted requests use.

use std::collections::BTreeMap;

use shadowslice_policy::workers::{
    Action, Cause, HandoverMode, HandoverPhase, LifecycleEvent, LifecycleReport, ResizeRefused,
    ResizeRequest, WorkerRole, Workers, WorkersState,
};
use shadowslice_shared::boot::BootRefusal;
use shadowslice_shared::units::{Percent, Sms};

use super::shares::sms_of;
use super::{RuleChecker, Step, Stimulus, Violation, rule};

/// The number of workers that must answer wrongly at a share before the share counts as the cause.
const MAX_WRONG_ANSWERS: u32 = 2;

/// The visible state before a step.
#[derive(Default)]
pub(super) struct Before {
    busy: bool,
    retires: bool,
    reference_written: bool,
    partitioned: bool,
    /// The number of workers with wrong answers, by their number of SMs.
    wrong_at: BTreeMap<Sms, u32>,
}

impl RuleChecker {
    /// Records the state that determines the answer to the next request.
    pub(super) fn look(&mut self, workers: &Workers) {
        self.before.busy = workers.coming().is_some();
        self.before.retires = workers.handover_phase() == Some(HandoverPhase::Retiring);
        self.before.partitioned = workers.partition().is_some();
    }

    pub(super) fn reference_is_written(&self) -> bool {
        self.before.reference_written
    }

    pub(super) fn wrong_before(&mut self, step: &Step<'_>) {
        match step.stimulus {
            Stimulus::LifecycleEvent(LifecycleEvent::ReferenceWritten { worker, result: Ok(()) }) => {
                self.before.reference_written |= self.workers.get(worker).is_some_and(|seen| !seen.leaves());
            }
            Stimulus::LifecycleEvent(LifecycleEvent::Refused {
                worker,
                refusal: BootRefusal::Proof { .. },
            }) => {
                let seen = self.workers.get(worker);
                let seen = seen.filter(|seen| seen.refused == Some(step.now) && seen.told_to_end.is_none());
                let Some(seen) =
                    seen.filter(|seen| seen.killed.is_none() && seen.role != Some(WorkerRole::Standby))
                else {
                    return;
                };
                let (share, primary) = (seen.launch.share, !seen.launch.low_priority);
                if share != Percent::WHOLE && !self.before.partitioned {
                    let times = self.before.wrong_at.entry(sms_of(&self.settings, share)).or_default();
                    *times += 1;
                    self.wrong_for_good = primary && *times >= MAX_WRONG_ANSWERS;
                }
            }
            _ => {}
        }
    }

    /// Checks that a model whose workers answered wrongly is not started again.
    pub(super) fn wrong_after(&mut self, step: &Step<'_>) -> Result<(), Violation> {
        if std::mem::take(&mut self.wrong_for_good) && !self.stopping {
            self.note("down: wrong answers");
            let down = matches!(step.workers.state(), WorkersState::Down { why, .. } if why.contains("answered wrongly"));
            return rule(down, "no worker starts after two wrong answers at a share");
        }
        Ok(())
    }

    fn is_in_force(&self, share: Percent, step: &Step<'_>) -> bool {
        let now = self.share();
        match step.workers.partition().filter(|_| self.before.partitioned) {
            Some((division, _)) => {
                self.partitions.count_of(division, share) == self.partitions.count_of(division, now)
            }
            None => sms_of(&self.settings, share) == sms_of(&self.settings, now),
        }
    }

    pub(super) fn refusal(&self, request: &ResizeRequest, step: &Step<'_>) -> Option<&'static str> {
        let share = request.share;
        let same = self.is_in_force(share, step);
        let wrong = !self.before.partitioned
            && self
                .before
                .wrong_at
                .get(&sms_of(&self.settings, share))
                .is_some_and(|times| *times >= MAX_WRONG_ANSWERS);
        let reasons = [
            (self.stopping, "stopping"),
            (self.answers.is_held() && request.cause != Cause::Hand, "held"),
            (!(self.settings.min..=self.settings.max).contains(&share), "out of bounds"),
            (self.settings.handover == HandoverMode::Never && !(self.down && same), "never"),
            (self.before.busy, "busy"),
            (!self.before.reference_written, "not serving"),
            (self.was_asleep && request.cause != Cause::Hand, "not serving"),
            (wrong, "wrong"),
            (same && !self.down, "in force"),
        ];
        reasons.iter().find(|(applies, _)| *applies).map(|(_, why)| *why)
    }

    pub(super) fn refused_rightly(&mut self, step: &Step<'_>) -> Result<(), Violation> {
        let Stimulus::LifecycleEvent(LifecycleEvent::Resize { request, hold }) = step.stimulus else {
            return Ok(());
        };
        let refused = step.actions.iter().find_map(|action| match action {
            Action::Report(LifecycleReport::Refused(refused, why)) if refused == request => Some(name(why)),
            _ => None,
        });
        let due = self.refusal(request, step);
        rule(refused == due, &format!("a request is refused if it must be: {due:?}, not {refused:?}"))?;
        let as_asked = matches!(refused, None | Some("in force"));
        let again = !self.was_ready && self.is_in_force(request.share, step);
        self.answers.holds(*hold && as_asked && !again && self.settings.policy_acts && !self.stopping);
        if refused.is_none() { self.means_is_quickest(request, step) } else { Ok(()) }
    }

    fn means_is_quickest(&mut self, request: &ResizeRequest, step: &Step<'_>) -> Result<(), Violation> {
        let parked = step.workers.handover_phase() == Some(HandoverPhase::Probation);
        rule(!parked, "a parked worker exits for the next change")?;
        let begun = step.actions.iter().find_map(|action| match action {
            Action::Report(LifecycleReport::Begun(begun, shadow)) if begun == request => Some(*shadow),
            _ => None,
        });
        if self.before.partitioned && !self.down && !self.was_asleep {
            return rule(begun.is_none(), "a share that is a partition changes inside the worker");
        }
        let ready = self.workers.values().any(|seen| {
            let stands = seen.standby_since.is_some() || seen.parked.is_some();
            seen.is_usable() && stands && seen.fits(request.share, &self.settings, false)
        });
        // A worker that outlives its order to exit still belongs to the last hand-over.
        let late = self.before.retires && self.workers.values().any(|seen| seen.killed.is_some());
        let at_once = begun.is_some_and(|shadow| shadow.is_some());
        rule(!ready || !self.was_ready || at_once || late, "a change is immediate if a worker is ready")
    }
}

fn name(why: &ResizeRefused) -> &'static str {
    match why {
        ResizeRefused::InForce { .. } => "in force",
        ResizeRefused::OutOfBounds { .. } => "out of bounds",
        ResizeRefused::Never(_) => "never",
        ResizeRefused::Held(_) => "held",
        ResizeRefused::Busy(_) => "busy",
        ResizeRefused::Wrong { .. } => "wrong",
        ResizeRefused::NotServing { .. } => "not serving",
        ResizeRefused::Stopping => "stopping",
        ResizeRefused::NoPartition { .. } => "failed",
    }
}
