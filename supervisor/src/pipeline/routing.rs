//! Which lane batches go to, on which SMs, and what becomes of those that go nowhere any more.

use shadowslice_shared::units::Moment;

use super::facts::LaneFact;
use super::lane::{Duty, Slice, WorkerId};
use super::note;
use super::state::State;
use crate::trace::{Handover, Lost};

impl State {
    /// Routes to `worker`, or to nobody. What the old lane has, it finishes.
    pub(crate) fn route(&mut self, worker: Option<WorkerId>, now: Moment) {
        let from = self.serving().map(|lane| self.lanes[lane].worker);
        if let Some(WorkerId(to)) = worker.filter(|_| worker != from) {
            self.routed = Some(Handover { at: now, from: from.map(|from| from.0), to });
        }
        for lane in &mut self.lanes {
            if Some(lane.worker) == worker {
                if lane.duty != Duty::Serving {
                    self.stats.recent.share_changed();
                    lane.proven = false;
                }
                lane.duty = Duty::Serving;
            } else if lane.duty == Duty::Serving {
                lane.duty = Duty::Standing;
            }
        }
        self.dispatch(now);
    }

    /// The next batch of `worker` runs on this part of the GPU.
    pub(crate) fn move_to(&mut self, worker: WorkerId, slice: Slice) {
        let Some(lane) = self.lane_mut(worker) else { return };
        lane.move_to(slice);
        if lane.duty == Duty::Serving {
            self.stats.recent.share_changed();
        }
    }

    /// Asks for a fact once `worker` has nothing in flight.
    pub(crate) fn drain(&mut self, worker: WorkerId) {
        let Some(lane) = self.lanes.iter_mut().find(|lane| lane.worker == worker) else { return };
        if lane.is_empty() {
            lane.duty = Duty::Standing;
            self.reporter.report(LaneFact::Drained(worker));
        } else {
            lane.duty = Duty::Draining;
        }
    }

    /// Takes back what `worker` has, without blaming anybody.
    pub(crate) fn requeue(&mut self, worker: WorkerId, now: Moment) {
        let Some(lane) = self.lane_mut(worker) else { return };
        let (mut executing, behind) = lane.abandon();
        executing.extend(behind);
        note::lost(&executing, Lost::TakenBack, now);
        self.put_back(executing, now);
        self.dispatch(now);
    }
}
