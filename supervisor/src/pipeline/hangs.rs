//! Workers that hang: they execute one batch for too long.

use std::time::Duration;

use shadowslice_shared::units::Moment;

use super::facts::LaneFact;
use super::lane::Lane;
use super::state::State;

/// A worker that seems to hang is looked at again after this: when this process itself could not run for
/// a while, answers lie unread, and their readers must get their turn first.
const SECOND_LOOK: Duration = Duration::from_millis(100);

impl State {
    /// When to look whether a worker hangs: as soon as one may, and once more if one then seems to.
    pub(crate) fn next_look(&mut self, now: Moment) -> Option<Moment> {
        let first = self.lanes.iter().filter_map(Lane::hangs_at).min();
        let seems_to = first.is_some_and(|due| due <= now);
        self.second_look = seems_to.then(|| self.second_look.unwrap_or(now + SECOND_LOOK));
        self.second_look.or(first)
    }

    /// At a second look, reports the lanes whose workers hang. Each is reported once: it is told to stop executing.
    pub(crate) fn report_hangs(&mut self, now: Moment) {
        if self.second_look.is_none_or(|due| due > now) {
            return;
        }
        let hung = |lane: &Lane| lane.hangs_at().is_some_and(|due| due <= now);
        let hung: Vec<_> = self.lanes.iter().filter(|lane| hung(lane)).map(|lane| lane.worker).collect();
        for worker in hung {
            if let Some(front) = self.lane_mut(worker).and_then(|lane| lane.in_flight.front_mut()) {
                front.executing_since = None;
            }
            self.reporter.report(LaneFact::Hung(worker));
        }
    }
}
