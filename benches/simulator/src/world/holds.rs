//! The holds of the simulated GPUs. As in the supervisor, a [`HoldBoard`] for each GPU decides which
//! batches wait between two pieces, and gets the batches that execute.
//!
//! ```text
//! models (executing batches) ─▶ HoldBoard ─▶ seats on the GPU
//! ```

use shadowslice_policy::holds::{HoldBoard, HoldChange, HoldTerms, MemberId};

use super::SharedState;
use super::model::{WorldModel, id};
use crate::time::timestamp;

/// The boards of all GPUs. The seats are the workers.
#[derive(Debug)]
pub(super) struct WorldHolds {
    /// False if no batch is ever held.
    is_enabled: bool,
    boards: Vec<HoldBoard>,
}

impl WorldHolds {
    pub(super) fn new(is_enabled: bool, gpus: usize) -> Self {
        Self { is_enabled, boards: (0..gpus).map(|_| HoldBoard::default()).collect() }
    }
}

/// Returns the name of a seat's worker on the board.
fn on_board(seat: usize) -> MemberId {
    MemberId(seat as u64)
}

impl WorldModel<'_> {
    /// Reports the executing batches of the model's workers if they have changed, and applies the holds
    /// that follow from them.
    pub(super) fn report_batches(&mut self, now: u64, shared: &mut SharedState<'_>) {
        if !shared.holds.is_enabled {
            return;
        }
        let terms = HoldTerms {
            priority: self.spec.terms.priority,
            slo: self.spec.terms.slo,
            can_be_held: self.spec.shared_process.is_none(),
        };
        for worker in 0..self.workers.len() {
            let Some(lane) = self.scheduler.lane(id(worker)) else { continue };
            let front = lane.in_flight().next().filter(|front| front.executing_since.is_some());
            let current = front.map(|front| (front.id, lane.in_flight().count()));
            if std::mem::replace(&mut self.workers[worker].reported, current) == current {
                continue;
            }
            let running = lane.running_batch(timestamp(now));
            let (gpu, seat) = (self.spec.terms.gpu, self.workers[worker].seat);
            let board = &mut shared.holds.boards[gpu];
            let changes = board.set_running(on_board(seat), terms, running, timestamp(now));
            shared.apply_holds(&changes, now);
        }
    }

    /// Ends the holds of a worker that has stopped, and the holds for its batches.
    pub(super) fn end_holds(&mut self, worker: usize, now: u64, shared: &mut SharedState<'_>) {
        let (gpu, seat) = (self.spec.terms.gpu, self.workers[worker].seat);
        self.workers[worker].reported = None;
        let changes = shared.holds.boards[gpu].remove(on_board(seat));
        shared.apply_holds(&changes, now);
        shared.gpus.release(seat, now, &mut shared.timers);
    }
}

impl SharedState<'_> {
    fn apply_holds(&mut self, changes: &[HoldChange], now: u64) {
        let begins = |change: &HoldChange| match change {
            HoldChange::Hold { worker, .. } => Some(*worker),
            HoldChange::Release { .. } => None,
        };
        let held: Vec<MemberId> = changes.iter().filter_map(begins).collect();
        for change in changes {
            match *change {
                HoldChange::Hold { worker, .. } => {
                    self.gpus.hold(worker.0 as usize, now, &mut self.timers);
                }
                HoldChange::Release { worker, .. } => {
                    // If another hold follows, a release in between would let a piece through.
                    if !held.contains(&worker) {
                        self.gpus.release(worker.0 as usize, now, &mut self.timers);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
