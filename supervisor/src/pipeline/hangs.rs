//! Workers that hang: they execute one batch for too long.

use std::time::Duration;

use shadowslice_shared::units::Moment;

use super::facts::LaneFact;
use super::lane::Lane;
use super::state::State;

/// A worker that seems to hang is looked at again after this: when this process itself could not run for
/// a while, answers lie unread, and their readers must get their turn first.
const SECOND_LOOK: Duration = Duration::from_millis(100);

impl Lane {
    /// When to look whether its worker hangs: as soon as it may, and once more if it then seems to.
    fn next_look(&mut self, now: Moment) -> Option<Moment> {
        let due = self.hangs_at();
        let seems_to = due.is_some_and(|due| due <= now);
        self.second_look = seems_to.then(|| self.second_look.unwrap_or(now + SECOND_LOOK));
        self.second_look.or(due)
    }

    /// Whether it hangs at a second look. That is said once: it is told to stop executing.
    fn hangs(&mut self, now: Moment) -> bool {
        let seen_twice = self.second_look.is_some_and(|due| due <= now);
        let hangs = seen_twice && self.hangs_at().is_some_and(|due| due <= now);
        if let Some(front) = self.in_flight.front_mut().filter(|_| hangs) {
            front.executing_since = None;
        }
        hangs
    }
}

impl State {
    /// When to look whether a worker hangs.
    pub(crate) fn next_look(&mut self, now: Moment) -> Option<Moment> {
        self.lanes.iter_mut().filter_map(|lane| lane.next_look(now)).min()
    }

    /// Reports the lanes whose workers hang.
    pub(crate) fn report_hangs(&mut self, now: Moment) {
        for worker in self.lanes.iter_mut().filter_map(|lane| lane.hangs(now).then_some(lane.worker)) {
            self.reporter.report(LaneFact::Hung(worker));
        }
    }
}
