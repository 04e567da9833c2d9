//! The holds of the workers that share a GPU. [`HoldBoard`] decides which batches wait. This module tells it
//! which batches execute, and writes the workers' hold words.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use shadowslice_policy::holds::{HoldBoard, HoldChange, HoldTerms, MemberId};
use shadowslice_shared::hold::HoldWord;
use shadowslice_shared::units::Timestamp;

use super::link::PipelineLane;

/// The holds of all workers of a GPU.
#[derive(Debug)]
pub struct GpuHolds {
    /// False if no batch is ever held.
    is_enabled: bool,
    state: Mutex<HoldsState>,
}

#[derive(Debug, Default)]
struct HoldsState {
    board: HoldBoard,
    members: BTreeMap<MemberId, HeldWorker>,
    /// The number of workers that have joined, which gives each its id.
    joined: u64,
    totals: BTreeMap<ModelPair, HoldTotal>,
}

#[derive(Debug)]
struct HeldWorker {
    model: Arc<str>,
    word: Arc<HoldWord>,
}

/// A model whose batches waited, and the model for which they waited.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ModelPair {
    pub held: Arc<str>,
    pub beneficiary: Arc<str>,
}

/// The holds of one model for another one since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HoldTotal {
    pub count: u64,
    pub time: Duration,
    pub longest: Duration,
}

impl HoldTotal {
    fn add(&mut self, held: Duration) {
        self.count += 1;
        self.time += held;
        self.longest = self.longest.max(held);
    }
}

impl GpuHolds {
    pub fn new(is_enabled: bool) -> Arc<Self> {
        Arc::new(Self { is_enabled, state: Mutex::default() })
    }

    /// Returns the holds since the start, by models.
    pub fn totals(&self) -> BTreeMap<ModelPair, HoldTotal> {
        self.state.lock().totals.clone()
    }

    /// Returns the holds of one model since the start, by the models for which its batches waited.
    fn totals_of(&self, model: &str) -> Vec<(Arc<str>, HoldTotal)> {
        let state = self.state.lock();
        let of_model = state.totals.iter().filter(|(pair, _)| &*pair.held == model);
        of_model.map(|(pair, total)| (Arc::clone(&pair.beneficiary), *total)).collect()
    }
}

impl HoldsState {
    fn apply(&mut self, changes: &[HoldChange]) {
        for change in changes {
            match *change {
                HoldChange::Hold { worker, number } => {
                    if let Some(member) = self.members.get(&worker) {
                        member.word.hold(number);
                    }
                }
                HoldChange::Release { worker, beneficiary, held } => {
                    let model = |worker| self.members.get(&worker).map(|member| Arc::clone(&member.model));
                    if let Some((held_model, beneficiary)) = model(worker).zip(model(beneficiary)) {
                        let pair = ModelPair { held: held_model, beneficiary };
                        self.totals.entry(pair).or_default().add(held);
                    }
                    let begins = |later: &HoldChange| matches!(later, HoldChange::Hold { worker: held, .. } if *held == worker);
                    // If another hold follows, a release in between would let a piece through.
                    if let Some(member) = self.members.get(&worker).filter(|_| !changes.iter().any(begins)) {
                        member.word.release();
                    }
                }
            }
        }
    }
}

/// A worker's membership in the holds of its GPU.
#[derive(Debug)]
pub(crate) struct HoldMember {
    holds: Arc<GpuHolds>,
    id: MemberId,
    /// The number of pieces of the worker's largest batch, or the reason why its batches never wait.
    pub(crate) pieces: Result<u32, String>,
    /// The executing batch, and the number of batches in flight, as reported last.
    reported: Option<(u64, usize)>,
}

impl HoldMember {
    pub(crate) fn join(
        holds: Arc<GpuHolds>,
        model: Arc<str>,
        word: Arc<HoldWord>,
        pieces: Result<u32, String>,
    ) -> Self {
        let mut state = holds.state.lock();
        state.joined += 1;
        let id = MemberId(state.joined);
        state.members.insert(id, HeldWorker { model, word });
        drop(state);
        Self { holds, id, pieces, reported: None }
    }

    /// Returns the holds of the worker's model since the start, by the models for which its batches waited.
    pub(crate) fn totals(&self, model: &str) -> Vec<(Arc<str>, HoldTotal)> {
        self.holds.totals_of(model)
    }

    /// Reports the executing batch of `lane`, and applies the holds that follow from it.
    pub(crate) fn update(&mut self, lane: &PipelineLane, priority: u32, slo: Duration, now: Timestamp) {
        if !self.holds.is_enabled {
            return;
        }
        let front = lane.in_flight().next().filter(|front| front.executing_since.is_some());
        let current = front.map(|front| (front.id, lane.in_flight().count()));
        if current == self.reported {
            return;
        }
        self.reported = current;
        let running = lane.running_batch(now);
        let terms = HoldTerms { priority, slo, can_be_held: self.pieces.is_ok() };
        let mut state = self.holds.state.lock();
        let changes = state.board.set_running(self.id, terms, running, now);
        state.apply(&changes);
    }
}

impl Drop for HoldMember {
    fn drop(&mut self) {
        let mut state = self.holds.state.lock();
        let changes = state.board.remove(self.id);
        state.apply(&changes);
        if let Some(HeldWorker { word, .. }) = state.members.remove(&self.id) {
            word.release();
        }
    }
}
