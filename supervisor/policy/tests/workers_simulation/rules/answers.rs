//! Rules about requests: each request is answered exactly once, within the time limits.

use std::collections::BTreeSet;

use shadowslice_policy::workers::{
    Cause, ChangeMechanism, ChangeReport, HandoverFailure, LifecycleEvent, LifecycleReport, ResizeRefused,
    ResizeRequest,
};
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::Timestamp;

use super::{RuleChecker, Step, Stimulus, Violation, rule};

/// The requests of a run, and their answers.
pub(super) struct Answers {
    held: bool,
    /// The numbers of the requests without an answer.
    open: BTreeSet<u64>,
    /// The hand-over that has started and has not completed.
    begun: Option<(ResizeRequest, Timestamp)>,
    /// The last hand-over that completed.
    completed: Option<ResizeRequest>,
}

impl Answers {
    pub(super) fn new(held: bool) -> Self {
        Self { held, open: BTreeSet::new(), begun: None, completed: None }
    }

    pub(super) fn begun(&self) -> Option<ResizeRequest> {
        self.begun.map(|(request, _)| request)
    }

    pub(super) fn is_held(&self) -> bool {
        self.held
    }

    pub(super) fn holds(&mut self, also: bool) {
        self.held |= also;
    }

    pub(super) fn begun_at(&self) -> Option<Timestamp> {
        self.begun.map(|(_, at)| at)
    }

    pub(super) fn all_are_given(&self) -> bool {
        self.open.is_empty() && self.begun.is_none()
    }

    fn answered(&mut self, request: &ResizeRequest) -> Result<(), Violation> {
        let Some(number) = request.number else { return Ok(()) };
        rule(self.open.remove(&number), "a request is answered once")
    }

    fn ends(&mut self, request: &ResizeRequest) -> Result<(), Violation> {
        let begun = self.begun.take().map(|(request, _)| request);
        rule(begun == Some(*request), "only a hand-over that began ends")
    }
}

impl RuleChecker {
    /// Records that an operator holds or releases the share.
    pub(crate) fn hold(&mut self, held: bool, news: bool) -> Result<(), Violation> {
        let before = std::mem::replace(&mut self.answers.held, held);
        rule(news == (before != held), "holding a share twice is not a change")
    }

    pub(super) fn asked(&mut self, step: &Step<'_>) {
        self.shares.stall = None;
        if let Stimulus::LifecycleEvent(LifecycleEvent::Resize { request, .. }) = step.stimulus {
            self.answers.open.extend(request.number);
        }
    }

    pub(super) fn report(&mut self, report: &LifecycleReport, step: &Step<'_>) -> Result<(), Violation> {
        match report {
            LifecycleReport::Begun(request, shadow) => self.begun(request, *shadow, step.now),
            LifecycleReport::Completed(change) => self.completed(change),
            LifecycleReport::HandoverFailed { change, rolled_back, reason } => {
                self.not_kept(change, *rolled_back, reason)
            }
            LifecycleReport::Aborted(request, why) => {
                self.answers.answered(request)?;
                if self.answers.begun.is_some() {
                    rule(*why == ResizeRefused::Stopping, "a hand-over ends with its own report")?;
                    return self.answers.ends(request);
                }
                self.note(match why {
                    ResizeRefused::NoPartition { .. } => "no partition of that size",
                    ResizeRefused::NotServing { .. } => "no worker at that share",
                    _ => "a change is given up as the model stops",
                });
                self.shares.aborted(why);
                Ok(())
            }
            LifecycleReport::Refused(request, why) => {
                self.note(match why {
                    ResizeRefused::InForce { .. } => "refused: in force",
                    ResizeRefused::OutOfBounds { .. } => "refused: out of bounds",
                    ResizeRefused::Never(_) => "refused: never",
                    ResizeRefused::Held(_) => "refused: held",
                    ResizeRefused::Busy(_) => "refused: busy",
                    ResizeRefused::Wrong { .. } => "refused: wrong answers",
                    ResizeRefused::NotServing { .. } => "refused: not serving",
                    ResizeRefused::Stopping => "refused: stopping",
                    ResizeRefused::NoPartition { .. } => {
                        return Err("a change that did not begin cannot fail".to_owned());
                    }
                });
                self.answers.answered(request)
            }
            LifecycleReport::FailedOver(failover) => self.failed_over(failover),
        }
    }

    fn begun(
        &mut self,
        request: &ResizeRequest,
        shadow: Option<WorkerId>,
        now: Timestamp,
    ) -> Result<(), Violation> {
        rule(self.answers.begun.is_none(), "one hand-over is under way at most")?;
        rule(self.shares.stall == Some(false), "the stall of a hand-over is measured from its beginning")?;
        if let Some(seen) = shadow.and_then(|shadow| self.workers.get(&shadow)) {
            let ready = seen.is_usable();
            self.note(if ready { "a hand-over at once" } else { "a hand-over to a starting worker" });
        }
        if request.cause == Cause::Worker {
            self.note("a hand-over as the worker can have no partition");
            self.brought_back(request.share)?;
        }
        self.answers.begun = Some((*request, now));
        self.shares.last = None;
        self.boots.begun();
        Ok(())
    }

    fn completed(&mut self, change: &ChangeReport) -> Result<(), Violation> {
        self.answers.answered(&change.request)?;
        if let ChangeMechanism::Shadow { .. } = change.mechanism {
            self.answers.ends(&change.request)?;
            self.answers.completed = Some(change.request);
        }
        self.note(match change.mechanism {
            ChangeMechanism::InProcess => "completed inside the worker",
            ChangeMechanism::Shadow { at_once: false } => "completed by a shadow",
            ChangeMechanism::Shadow { at_once: true } => "completed at once",
            ChangeMechanism::Revive => "completed by a start of the model",
        });
        self.in_force(change)
    }

    fn not_kept(
        &mut self,
        change: &ChangeReport,
        rolled_back: bool,
        reason: &HandoverFailure,
    ) -> Result<(), Violation> {
        self.note(match (rolled_back, reason) {
            (true, HandoverFailure::Died) => "rolled back: died",
            (true, _) => "rolled back: misbehaved",
            (false, HandoverFailure::BootFailed(_)) => "aborted: boot failed",
            (false, HandoverFailure::SpawnTimedOut) => "aborted: spawn timed out",
            (false, HandoverFailure::WarmTimedOut) => "aborted: warm timed out",
            (false, HandoverFailure::Died) => "aborted: died",
            (false, HandoverFailure::Misbehaved(_)) => "aborted: misbehaved",
        });
        if rolled_back {
            rule(
                self.answers.completed.take() == Some(change.request),
                "only a completed hand-over is rolled back",
            )?;
            return self.rolled_back(change);
        }
        self.answers.answered(&change.request)?;
        self.answers.ends(&change.request)
    }

    /// Checks that each request is answered, and that every hand-over ends within the time limits.
    pub(super) fn all_are_answered(&mut self, step: &Step<'_>) -> Result<(), Violation> {
        rule(step.workers.is_held() == self.answers.held, "a share is held from the order to the release")?;
        let known = step.workers.coming().is_some() || self.answers.open.is_empty();
        rule(known, "an open request is reported as coming")?;
        rule(self.answers.open.len() <= 2, "one change is under way at most, and one waits")?;
        rule(
            !self.stopping || self.answers.all_are_given(),
            "all requests are answered when the model stops",
        )?;
        let timeouts = self.settings.timeouts;
        let bound = timeouts.spawn + timeouts.warm + timeouts.drain + 2 * timeouts.stop + 8 * self.allowance;
        let late = self.answers.begun_at().is_some_and(|begun| step.now > begun + bound);
        rule(!late, "every hand-over ends in time")
    }
}
