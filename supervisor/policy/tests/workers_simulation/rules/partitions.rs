//! Rules about partitions. Batches run only on groups that the model can use and that belong to its
//! share.

use shadowslice_policy::scheduler::Slice;
use shadowslice_policy::workers::{Action, ChangeMechanism, LifecycleEvent, LifecycleReport};
use shadowslice_shared::boot::PartitionProof;
use shadowslice_shared::groups::{Division, Groups, READY_PARTITIONS};
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::Percent;

use super::{RuleChecker, Step, Stimulus, Violation, rule};

/// The maximum time in which a worker must prepare a partition.
const PREPARE_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(10);

/// The requested groups, and the proofs of workers.
#[derive(Default)]
pub(super) struct Partitions {
    pub(super) proven: Vec<PartitionProof>,
    pub(super) given: Option<Groups>,
    pub(super) asked: Option<usize>,
    pub(super) unanswered: usize,
    /// The share with which batches moved to other groups in this step.
    pub(super) moved_as: Option<Percent>,
}

impl Partitions {
    /// Returns the number of groups of a share.
    pub(super) fn count_of(&self, division: &Division, share: Percent) -> usize {
        let fits = division.groups_of(share);
        let able = self.proven.iter().filter(|proof| proof.result.is_ok()).map(|proof| proof.groups);
        let mut able: Vec<usize> = able.collect();
        able.sort_unstable();
        able.iter().rev().find(|count| **count <= fits).or(able.first()).copied().unwrap_or(fits)
    }
}

impl RuleChecker {
    pub(super) fn prepare(
        &mut self,
        worker: WorkerId,
        groups: Groups,
        step: &Step<'_>,
    ) -> Result<(), Violation> {
        rule(self.routed == Some(worker), "only the worker that serves prepares partitions")?;
        let given = self.partitions.given;
        let seen = self.seen(worker);
        rule(seen.is_usable() && seen.first.is_some(), "only a worker with partitions prepares them")?;
        rule(groups != Groups::WHOLE, "the whole GPU is always ready")?;
        rule(!seen.cannot.contains(&groups), "an impossible partition is not tried again")?;
        rule(!seen.ready.contains(&groups), "a ready partition is not prepared again")?;
        rule(seen.prepares.is_none(), "one partition is prepared at a time")?;
        rule(given == Some(groups), "only the model's partition is prepared")?;
        seen.prepares = Some((groups, step.now + PREPARE_TIMEOUT));
        Ok(())
    }

    pub(super) fn forget(&mut self, worker: WorkerId, groups: Groups) -> Result<(), Violation> {
        self.note("a partition is released");
        let seen = self.seen(worker);
        rule(seen.runs_on != groups, "a partition in use is not released")?;
        rule(seen.ready.contains(&groups), "only a ready partition is released")?;
        seen.ready.retain(|ready| *ready != groups);
        Ok(())
    }

    pub(super) fn moved(
        &mut self,
        worker: WorkerId,
        share: Percent,
        slice: &Slice,
        step: &Step<'_>,
    ) -> Result<(), Violation> {
        rule(self.routed == Some(worker), "the worker that serves moves")?;
        let groups = slice.groups;
        let leaves = step.actions.contains(&Action::NeedsShadows);
        let seen = self.seen(worker);
        rule(
            groups == Groups::WHOLE || seen.ready.contains(&groups),
            "batches move only to ready partitions",
        )?;
        rule(!seen.cannot.contains(&groups), "batches do not move to an impossible partition")?;
        rule(leaves || seen.runs_on != groups, "batches move to another partition")?;
        seen.runs_on = groups;
        let total = step.workers.partition().map_or(0, |(division, _)| division.count());
        let small = groups != Groups::WHOLE && groups.count() < total && !groups.count().is_multiple_of(2);
        rule(slice.max_rows == small.then_some(1), "batches are no larger than what fits on the groups")?;
        self.partitions.moved_as = Some(share);
        self.note("batches move");
        Ok(())
    }

    /// Records events about groups before the actions are checked.
    pub(super) fn groups_before(&mut self, step: &Step<'_>) {
        match step.stimulus {
            Stimulus::LifecycleEvent(LifecycleEvent::Warmed { worker, warmed, .. }) => {
                let news = self.workers.get(worker).is_some_and(|seen| !seen.attached && !seen.leaves());
                if let Some(proven) = warmed.partitions.as_ref().filter(|_| news) {
                    self.partitions.proven.clone_from(&proven.counts);
                }
            }
            Stimulus::LifecycleEvent(LifecycleEvent::Groups(groups)) => {
                self.partitions.given = Some(*groups);
                self.partitions.unanswered = self.partitions.unanswered.saturating_sub(1);
            }
            _ => {}
        }
    }

    pub(super) fn ask_groups(&mut self, count: usize) {
        self.partitions.asked = Some(count);
        self.partitions.unanswered += 1;
    }

    pub(super) fn partitions_fit(&mut self, step: &Step<'_>) -> Result<(), Violation> {
        let Some((division, current)) = step.workers.partition() else { return Ok(()) };
        let share = self.share();
        let count = self.partitions.count_of(division, share);
        let Some(seen) = self.serving().filter(|seen| seen.first.is_some()) else { return Ok(()) };
        rule(current == seen.runs_on, "the reported groups are those on which batches run")?;
        let many = seen.ready.len() + usize::from(seen.prepares.is_some());
        rule(many <= READY_PARTITIONS, "the number of ready partitions is bounded")?;
        let moved_as = self.partitions.moved_as.is_none_or(|moved| moved == share);
        rule(moved_as, "batches move with the share in force")?;
        let given = self.partitions.given.unwrap_or(Groups::WHOLE);
        let has = if given == Groups::WHOLE { division.count() } else { given.count() };
        let right = seen.runs_on == given && has == count && self.partitions.unanswered == 0;
        let completed = step.actions.iter().any(completes_inside);
        rule(!completed || right, "a share inside the worker is in force if batches run there")?;
        if self.partitions.unanswered > 0 || self.stopping {
            return Ok(());
        }
        let settled = step.workers.coming().is_none();
        let asked = self.partitions.asked.is_none_or(|asked| asked == count);
        rule(!settled || asked, "the requested groups match the share")?;
        let waits = seen.prepares.is_some() || seen.cannot.contains(&given);
        rule(waits || seen.runs_on == given, "batches run on the groups that the model has")?;
        let due = seen.prepares.is_none_or(|(_, by)| step.now <= by + self.allowance);
        rule(due, "a worker that does not prepare a partition hangs")
    }
}

fn completes_inside(action: &Action) -> bool {
    matches!(action, Action::Report(LifecycleReport::Completed(change)) if change.mechanism == ChangeMechanism::InProcess)
}
