//! Detects workers that hang. A worker hangs if it executes one batch for too long.

use std::time::Duration;

use shadowslice_policy::scheduler::RefusalReason;
use shadowslice_shared::units::Timestamp;

use super::lane_events::LaneEvent;
use super::link::{PipelineLane, WorkerLink};
use crate::pipeline::requests::WaitingRequest;
use crate::pipeline::state::PipelineState;

/// The delay after which a worker that seems to hang is checked again. If this process was
/// suspended for a while, there may be unread answers. The lanes' readers must read these answers
/// before the second check.
const RECHECK_DELAY: Duration = Duration::from_millis(100);

/// A batch that executes for longer than expected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StalledBatch {
    pub requests: usize,
    /// The time for which the batch has executed.
    pub executes: Duration,
    /// The remaining time until the worker is considered hung, if the load on the GPU does not
    /// change.
    pub left: Duration,
}

/// The longest interval between checks of an executing batch. Other batches on the same GPU may end
/// in the meantime, which brings the batch's time limit forward.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

impl WorkerLink {
    /// Returns the time of the next check of this worker. If the worker already seems to hang, this
    /// is the time of the second check.
    fn next_check(&mut self, lane: &PipelineLane, now: Timestamp) -> Option<Timestamp> {
        self.update_occupancy(lane, now);
        let left = self.time_until_hung(lane, now);
        let seems_hung = left == Some(Duration::ZERO);
        self.recheck_at = seems_hung.then(|| self.recheck_at.unwrap_or(now + RECHECK_DELAY));
        self.recheck_at.or(left.map(|left| now + left.min(CHECK_INTERVAL)))
    }

    fn hangs(&self, lane: &PipelineLane, now: Timestamp) -> bool {
        let was_checked_twice = self.recheck_at.is_some_and(|due| due <= now);
        was_checked_twice && self.time_until_hung(lane, now) == Some(Duration::ZERO)
    }
}

impl PipelineState {
    pub(crate) fn next_check(&mut self, now: Timestamp) -> Option<Timestamp> {
        let Self { scheduler, links, priority, .. } = self;
        let checks = links.iter_mut().filter_map(|link| {
            let lane = scheduler.lane(link.worker)?;
            link.pauses.update(scheduler, link.worker, *priority, now);
            link.next_check(lane, now)
        });
        checks.min()
    }

    /// Refuses requests past their deadline if the model sleeps or a suspect is executing. A suspect is a request that
    /// was executing when a worker died or hung. Its time limit doubles with each of these deaths,
    /// so the requests behind the suspect could wait long.
    pub(crate) fn refuse_overdue(&mut self, now: Timestamp) {
        let is_suspect = |request: &WaitingRequest| request.item.deaths > 0;
        let lane = self.scheduler.serving_lane().filter(|lane| lane.is_stalled(now));
        let front = lane.and_then(|lane| lane.in_flight().next());
        if front.is_some_and(|front| front.requests.iter().any(is_suspect)) {
            self.refuse_all_overdue(RefusalReason::Overdue, now);
        }
        if self.refuses_asleep() {
            self.refuse_all_overdue(RefusalReason::Asleep, now);
        }
    }

    fn refuse_all_overdue(&mut self, why: RefusalReason, now: Timestamp) {
        let overdue = self.scheduler.take_overdue(why, now);
        overdue.into_iter().for_each(|refused| self.reject(refused, now));
    }

    /// Returns the batch that the serving worker is executing if the batch takes longer than
    /// expected.
    pub(crate) fn stalled_batch(&self, now: Timestamp) -> Option<StalledBatch> {
        let lane = self.scheduler.serving_lane().filter(|lane| lane.is_stalled(now))?;
        let front = lane.in_flight().next()?;
        let executes = now.since(front.executing_since?);
        let link = self.links.iter().find(|link| link.worker == lane.worker)?;
        let left = link.time_until_hung(lane, now)?;
        Some(StalledBatch { requests: front.requests.len(), executes, left })
    }

    /// Reports each hung worker once. After the report, the worker's batch no longer counts as
    /// executing.
    pub(crate) fn report_hangs(&mut self, now: Timestamp) {
        for link in &self.links {
            if self.scheduler.lane(link.worker).is_some_and(|lane| link.hangs(lane, now)) {
                self.scheduler.set_executing_since(link.worker, None);
                self.report(LaneEvent::Hung(link.worker));
            }
        }
    }
}
