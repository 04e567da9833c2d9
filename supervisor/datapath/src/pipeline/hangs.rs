//! Workers that hang: they execute one batch for too long.

use std::time::Duration;

use shadowslice_shared::units::Timestamp;

use super::facts::LaneFact;
use super::link::{Lane, Link};
use super::pending::Waiting;
use super::state::State;

/// A worker that seems to hang is looked at again after this: when this process could not run for a
/// while, answers lie unread, and their readers must get their turn first.
const SECOND_LOOK: Duration = Duration::from_millis(100);

/// A batch that executes for longer than it should.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StalledBatch {
    pub requests: usize,
    /// For how long by now.
    pub executes: Duration,
    /// Until its worker counts as hung, if the GPU stays as crowded as it is.
    pub left: Duration,
}

/// How often a batch that may hang is looked at: others on its GPU may end meanwhile, and it may
/// then take less time.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

impl Link {
    /// When to look whether its worker hangs: as soon as it may, and once more if it then seems to.
    fn next_look(&mut self, lane: &Lane, now: Timestamp) -> Option<Timestamp> {
        self.note_running(lane, now);
        let left = self.hangs_in(lane, now);
        let seems_to = left == Some(Duration::ZERO);
        self.second_look = seems_to.then(|| self.second_look.unwrap_or(now + SECOND_LOOK));
        self.second_look.or(left.map(|left| now + left.min(LOOK_AGAIN)))
    }

    fn hangs(&self, lane: &Lane, now: Timestamp) -> bool {
        let seen_twice = self.second_look.is_some_and(|due| due <= now);
        seen_twice && self.hangs_in(lane, now) == Some(Duration::ZERO)
    }
}

impl State {
    pub(crate) fn next_look(&mut self, now: Timestamp) -> Option<Timestamp> {
        let Self { scheduler, links, .. } = self;
        links.iter_mut().filter_map(|link| link.next_look(scheduler.lane(link.worker)?, now)).min()
    }

    /// Refuses the requests that wait past their deadline while a request executes that seems to
    /// hang not for the first time: such requests are given more and more time.
    pub(crate) fn refuse_overdue(&mut self, now: Timestamp) {
        let is_suspect = |request: &Waiting| request.item.deaths > 0;
        let lane = self.scheduler.serving_lane().filter(|lane| lane.is_stalled(now));
        let front = lane.and_then(|lane| lane.in_flight().next());
        if front.is_some_and(|front| front.requests.iter().any(is_suspect)) {
            let overdue = self.scheduler.take_overdue(now);
            overdue.into_iter().for_each(|refused| self.reject(refused, now));
        }
    }

    /// The batch that the serving worker executes, if something is wrong with it.
    pub(crate) fn stalled(&self, now: Timestamp) -> Option<StalledBatch> {
        let lane = self.scheduler.serving_lane().filter(|lane| lane.is_stalled(now))?;
        let front = lane.in_flight().next()?;
        let executes = now.since(front.executing_since?);
        let link = self.links.iter().find(|link| link.worker == lane.worker)?;
        let left = link.hangs_in(lane, now)?;
        Some(StalledBatch { requests: front.requests.len(), executes, left })
    }

    /// Reports the workers that hang, once each: the batch counts as executing no more.
    pub(crate) fn report_hangs(&mut self, now: Timestamp) {
        for link in &self.links {
            if self.scheduler.lane(link.worker).is_some_and(|lane| link.hangs(lane, now)) {
                self.scheduler.set_executing_since(link.worker, None);
                self.report(LaneFact::Hung(link.worker));
            }
        }
    }
}
