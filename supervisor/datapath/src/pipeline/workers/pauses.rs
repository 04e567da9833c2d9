//! The pauses of the workers that share a GPU. [`PauseBoard`] decides which batches wait. This module tells it
//! which batches execute, and writes the workers' pause words.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use shadowslice_policy::pauses::{MemberId, PauseBoard, PauseChange, PauseTerms};
use shadowslice_policy::scheduler::ExecutingBatch;
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::pause::PauseWord;
use shadowslice_shared::units::Timestamp;

use super::link::PipelineScheduler;

/// The pauses of all workers of a GPU.
#[derive(Debug)]
pub struct GpuPauses {
    /// False if no batch is ever paused.
    is_enabled: bool,
    state: Mutex<PausesState>,
}

#[derive(Debug, Default)]
struct PausesState {
    board: PauseBoard,
    members: BTreeMap<MemberId, PausedWorker>,
    /// The number of workers that have joined, which gives each its id.
    joined: u64,
    totals: BTreeMap<ModelPair, PauseTotal>,
}

#[derive(Debug)]
struct PausedWorker {
    model: Arc<str>,
    word: Arc<PauseWord>,
}

/// A model whose batches waited, and the model for which they waited.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ModelPair {
    pub paused: Arc<str>,
    pub beneficiary: Arc<str>,
}

/// The pauses of one model for another one since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PauseTotal {
    pub count: u64,
    pub time: Duration,
    pub longest: Duration,
}

impl PauseTotal {
    fn add(&mut self, paused: Duration) {
        self.count += 1;
        self.time += paused;
        self.longest = self.longest.max(paused);
    }
}

impl GpuPauses {
    pub fn new(is_enabled: bool) -> Arc<Self> {
        Arc::new(Self { is_enabled, state: Mutex::default() })
    }

    /// Returns the pauses since the start, by models.
    pub fn totals(&self) -> BTreeMap<ModelPair, PauseTotal> {
        self.state.lock().totals.clone()
    }

    /// Returns the pauses of one model since the start, by the models for which its batches waited.
    fn totals_of(&self, model: &str) -> Vec<(Arc<str>, PauseTotal)> {
        let state = self.state.lock();
        let of_model = state.totals.iter().filter(|(pair, _)| &*pair.paused == model);
        of_model.map(|(pair, total)| (Arc::clone(&pair.beneficiary), *total)).collect()
    }
}

impl PausesState {
    fn apply(&mut self, changes: &[PauseChange]) {
        for change in changes {
            match *change {
                PauseChange::Pause { worker, number } => {
                    if let Some(member) = self.members.get(&worker) {
                        member.word.pause(number);
                    }
                }
                PauseChange::Release { worker, beneficiary, paused } => {
                    let model = |worker| self.members.get(&worker).map(|member| Arc::clone(&member.model));
                    if let Some((paused_model, beneficiary)) = model(worker).zip(model(beneficiary)) {
                        let pair = ModelPair { paused: paused_model, beneficiary };
                        self.totals.entry(pair).or_default().add(paused);
                    }
                    let begins = |later: &PauseChange| matches!(later, PauseChange::Pause { worker: paused, .. } if *paused == worker);
                    // If another pause follows, a release in between would let a piece through.
                    if let Some(member) = self.members.get(&worker).filter(|_| !changes.iter().any(begins)) {
                        member.word.release();
                    }
                }
            }
        }
    }
}

/// A worker's membership in the pauses of its GPU.
#[derive(Debug)]
pub(crate) struct PauseMember {
    pauses: Arc<GpuPauses>,
    id: MemberId,
    /// The number of pieces of the worker's largest batch, or the reason why its batches never wait.
    pub(crate) pieces: Result<u32, String>,
    /// The executing batch that was reported last.
    reported: Option<ExecutingBatch>,
}

impl PauseMember {
    pub(crate) fn join(
        pauses: Arc<GpuPauses>,
        model: Arc<str>,
        word: Arc<PauseWord>,
        pieces: Result<u32, String>,
    ) -> Self {
        let mut state = pauses.state.lock();
        state.joined += 1;
        let id = MemberId(state.joined);
        state.members.insert(id, PausedWorker { model, word });
        drop(state);
        Self { pauses, id, pieces, reported: None }
    }

    /// Returns true if the worker's batches have several pieces, and pauses are permitted.
    pub(crate) fn can_pause(&self) -> bool {
        self.pauses.is_enabled && self.pieces.as_ref().is_ok_and(|&pieces| pieces > 1)
    }

    /// Returns the pauses of the worker's model since the start, by the models for which its batches waited.
    pub(crate) fn totals(&self, model: &str) -> Vec<(Arc<str>, PauseTotal)> {
        self.pauses.totals_of(model)
    }

    /// Reports the batch that `worker` executes, and applies the pauses that follow from it.
    pub(crate) fn update(
        &mut self,
        scheduler: &PipelineScheduler,
        worker: WorkerId,
        priority: u32,
        now: Timestamp,
    ) {
        if !self.pauses.is_enabled || scheduler.executing(worker) == self.reported {
            return;
        }
        self.reported = scheduler.executing(worker);
        let running = scheduler.running_batch(worker, now);
        let terms = PauseTerms {
            priority,
            slo: scheduler.slo(),
            can_be_paused: scheduler.pauses() && self.pieces.is_ok(),
        };
        let mut state = self.pauses.state.lock();
        let changes = state.board.set_running(self.id, terms, running, now);
        state.apply(&changes);
    }
}

impl Drop for PauseMember {
    fn drop(&mut self) {
        let mut state = self.pauses.state.lock();
        let changes = state.board.remove(self.id);
        state.apply(&changes);
        if let Some(PausedWorker { word, .. }) = state.members.remove(&self.id) {
            word.release();
        }
    }
}
