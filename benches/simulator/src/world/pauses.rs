//! The pauses of the simulated GPUs. As in the supervisor, a [`PauseBoard`] for each GPU decides which
//! batches wait between two pieces, and gets the batches that execute.
//!
//! ```text
//! models (executing batches) ─▶ PauseBoard ─▶ seats on the GPU
//! ```

use shadowslice_policy::pauses::{MemberId, PauseBoard, PauseChange, PauseTerms};

use super::SharedState;
use super::model::{WorldModel, id};
use crate::time::timestamp;

/// The boards of all GPUs. The seats are the workers.
#[derive(Debug)]
pub(super) struct WorldPauses {
    /// False if no batch is ever paused.
    pub(super) is_enabled: bool,
    boards: Vec<PauseBoard>,
}

impl WorldPauses {
    pub(super) fn new(is_enabled: bool, gpus: usize) -> Self {
        Self { is_enabled, boards: (0..gpus).map(|_| PauseBoard::default()).collect() }
    }
}

/// Returns the name of a seat's worker on the board.
fn on_board(seat: usize) -> MemberId {
    MemberId(seat as u64)
}

impl WorldModel<'_> {
    /// Reports the executing batches of the model's workers if they have changed, and applies the pauses
    /// that follow from them.
    pub(super) fn report_batches(&mut self, now: u64, shared: &mut SharedState<'_>) {
        if !shared.pauses.is_enabled {
            return;
        }
        let terms = PauseTerms {
            priority: self.spec.terms.priority,
            slo: self.spec.terms.slo,
            can_be_paused: self.scheduler.pauses() && self.spec.shared_process.is_none(),
        };
        for worker in 0..self.workers.len() {
            let current = self.scheduler.executing(id(worker));
            if std::mem::replace(&mut self.workers[worker].reported, current) == current {
                continue;
            }
            let running = self.scheduler.running_batch(id(worker), timestamp(now));
            let (gpu, seat) = (self.spec.terms.gpu, self.workers[worker].seat);
            let board = &mut shared.pauses.boards[gpu];
            let changes = board.set_running(on_board(seat), terms, running, timestamp(now));
            shared.apply_pauses(&changes, now);
        }
    }

    /// Ends the pauses of a worker that has stopped, and the pauses for its batches.
    pub(super) fn end_pauses(&mut self, worker: usize, now: u64, shared: &mut SharedState<'_>) {
        let (gpu, seat) = (self.spec.terms.gpu, self.workers[worker].seat);
        self.workers[worker].reported = None;
        let changes = shared.pauses.boards[gpu].remove(on_board(seat));
        shared.apply_pauses(&changes, now);
        shared.gpus.release(seat, now, &mut shared.timers);
    }
}

impl SharedState<'_> {
    fn apply_pauses(&mut self, changes: &[PauseChange], now: u64) {
        let begins = |change: &PauseChange| match change {
            PauseChange::Pause { worker, .. } => Some(*worker),
            PauseChange::Release { .. } => None,
        };
        let paused: Vec<MemberId> = changes.iter().filter_map(begins).collect();
        for change in changes {
            match *change {
                PauseChange::Pause { worker, .. } => {
                    self.gpus.pause(worker.0 as usize, now, &mut self.timers);
                }
                PauseChange::Release { worker, .. } => {
                    // If another pause follows, a release in between would let a piece through.
                    if !paused.contains(&worker) {
                        self.gpus.release(worker.0 as usize, now, &mut self.timers);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
