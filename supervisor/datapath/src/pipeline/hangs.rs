//! Workers that hang: they execute one batch for too long.

use std::time::Duration;

use shadowslice_shared::units::Moment;

use super::facts::LaneFact;
use super::link::{Lane, Link};
use super::state::State;

/// A worker that seems to hang is looked at again after this: when this process could not run for a
/// while, answers lie unread, and their readers must get their turn first.
const SECOND_LOOK: Duration = Duration::from_millis(100);

impl Link {
    /// When to look whether its worker hangs: as soon as it may, and once more if it then seems to.
    fn next_look(&mut self, lane: &Lane, now: Moment) -> Option<Moment> {
        let due = self.hangs_at(lane);
        let seems_to = due.is_some_and(|due| due <= now);
        self.second_look = seems_to.then(|| self.second_look.unwrap_or(now + SECOND_LOOK));
        self.second_look.or(due)
    }

    fn hangs(&self, lane: &Lane, now: Moment) -> bool {
        let seen_twice = self.second_look.is_some_and(|due| due <= now);
        seen_twice && self.hangs_at(lane).is_some_and(|due| due <= now)
    }
}

impl State {
    pub(crate) fn next_look(&mut self, now: Moment) -> Option<Moment> {
        let Self { scheduler, links, .. } = self;
        links.iter_mut().filter_map(|link| link.next_look(scheduler.lane(link.worker)?, now)).min()
    }

    /// Reports the workers that hang, once each: the batch counts as executing no more.
    pub(crate) fn report_hangs(&mut self, now: Moment) {
        for link in &self.links {
            if self.scheduler.lane(link.worker).is_some_and(|lane| link.hangs(lane, now)) {
                self.scheduler.executes_since(link.worker, None);
                self.report(LaneFact::Hung(link.worker));
            }
        }
    }
}
