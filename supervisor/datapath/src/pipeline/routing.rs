//! Which lane batches go to, on which SMs, and where the batches of a lane that is given up go.

use shadowslice_policy::scheduler::{Abandoned, Slice};
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::{Moment, Percent};

use super::facts::LaneFact;
use super::note;
use super::state::State;
use crate::trace::{Handover, Lost};

impl State {
    /// Routes to `worker`, or to no worker. The old lane finishes the batches that it has.
    pub(crate) fn route(&mut self, worker: Option<WorkerId>, now: Moment) {
        let from = self.scheduler.serving_lane().map(|lane| lane.worker);
        if let Some(WorkerId(to)) = worker.filter(|_| worker != from) {
            self.routed = Some(Handover { at: now, from: from.map(|from| from.0), to });
        }
        self.scheduler.route(worker);
        self.dispatch(now);
    }

    /// The next batch of `worker` runs on this part of the GPU.
    pub(crate) fn move_to(&mut self, worker: WorkerId, share: Percent, slice: &Slice) {
        if let Some(link) = self.link_mut(worker) {
            link.move_to(share, slice);
        }
        self.scheduler.move_to(worker, slice);
    }

    /// Asks for a fact once `worker` has nothing in flight.
    pub(crate) fn drain(&mut self, worker: WorkerId) {
        if self.scheduler.drain(worker) {
            self.reporter.report(LaneFact::Drained(worker));
        }
    }

    /// Takes the requests of `worker` back, without blame.
    pub(crate) fn requeue(&mut self, worker: WorkerId, now: Moment) {
        let Abandoned { mut executing, behind } = self.take_back(worker);
        executing.extend(behind);
        note::lost(&executing, Lost::TakenBack, now);
        self.put_back(executing, now);
        self.dispatch(now);
    }
}
