//! The sessions of a model on a GPU, and the choice of a session for each batch.

use ort::value::ValueType;
use shadowslice_shared::batch::RunFailure;
use shadowslice_shared::boot::{BootRefusal, ProviderSpec};

use super::bound::{BoundBatch, ExecutionMode, SessionRef};
use super::loader::{Fallback, Lengths, Loader, lengths};
use super::scratch::Scratch;
use super::weights::Weights;
use super::{OnnxSession, Signature, model_file};
use crate::device::cuda::exclusion::Exclusion;
use crate::engine::shapes::InputShapes;

/// The sessions of one model.
pub(super) struct Sessions {
    /// All sessions of the model, at least one.
    all: Vec<OnnxSession>,
    /// The index of one session for each arena.
    arenas: Vec<usize>,
    /// True if one of the sessions uses the arena of the worker.
    has_shared_arena: bool,
    loader: Loader,
    phase: Phase,
    host_fallback_reason: Option<String>,
}

/// The phase of the worker, which determines how batches use sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The warm-up, whose batches are recorded.
    Warming(Sharing),
    /// The phase after the warm-up, in which nothing is recorded. A batch of a new form runs in the
    /// session `spare`. No recording depends on that session's state or writes to its memory.
    Done { spare: Option<usize> },
}

/// The rule that decides which batches share a session during the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sharing {
    All,
    /// Batches of one shape share a session, because a session stores data for the last shape that
    /// it processed.
    Shape,
    /// Batches of one shape share a session in which every axis has a fixed length. With dynamic
    /// axes, the host's CPU does some of the work, such as computing shapes, and a recording would
    /// not repeat that work. The first session leaves all axes dynamic and is not recorded.
    Fixed,
}

impl Sessions {
    pub(super) fn load(mut loader: Loader) -> Result<(Self, Signature), BootRefusal> {
        let shared = loader.scratch(Scratch::Shared);
        let whole = loader.session(Fallback::Forbidden, &Lengths::new(), shared);
        let (session, signature, sharing, scratch) = match whole {
            Ok((session, signature)) => {
                let apart = model_file::remembers_shapes(&loader.graph());
                (session, signature, if apart { Sharing::Shape } else { Sharing::All }, shared)
            }
            // Either the GPU does not support all operators, or the model cannot be loaded at all.
            // The next attempt also fails in the second case.
            Err(_) => {
                let (session, signature) =
                    loader.session(Fallback::Allowed, &Lengths::new(), Scratch::Own)?;
                (session, signature, Sharing::Fixed, Scratch::Own)
            }
        };
        let (all, arenas, phase) = (vec![session], vec![0], Phase::Warming(sharing));
        let has_shared_arena = scratch == Scratch::Shared;
        let sessions = Self { all, arenas, has_shared_arena, loader, phase, host_fallback_reason: None };
        Ok((sessions, signature))
    }

    pub(super) fn has_tensorrt(&self) -> bool {
        self.loader.providers.iter().any(|provider| matches!(provider, ProviderSpec::TensorRt { .. }))
    }

    /// Returns the number of sessions.
    pub(super) fn count(&self) -> usize {
        self.all.len()
    }

    pub(super) fn first(&self) -> &OnnxSession {
        &self.all[0]
    }

    pub(super) fn first_mut(&mut self) -> &mut OnnxSession {
        &mut self.all[0]
    }

    pub(super) fn at(&self, of: SessionRef) -> &OnnxSession {
        &self.all[of.index]
    }

    pub(super) fn at_mut(&mut self, of: SessionRef) -> &mut OnnxSession {
        &mut self.all[of.index]
    }

    pub(super) fn host_fallback_reason(&self) -> Option<&str> {
        self.host_fallback_reason.as_deref()
    }

    /// Returns the reason why this worker does not share all weights with other workers, or `None`
    /// if it does. A session that loads the model's own file shares no weights.
    pub(super) fn unshared(&self) -> Option<&str> {
        self.loader.unshared.as_deref().or(self.loader.weights.unshared())
    }

    /// Returns the size of all shared weights on the GPU, and the size of the shared weights that
    /// this worker copied there, in bytes.
    pub(super) fn weights(&self) -> (u64, u64) {
        self.loader.weights.bytes()
    }

    /// Returns the shared weights.
    pub(super) fn weights_mut(&mut self) -> &mut Weights {
        &mut self.loader.weights
    }

    /// Drops all sessions. No batch may run afterwards.
    pub(super) fn clear(&mut self) {
        let _exclusion = Exclusion::of_setup();
        self.all.clear();
    }

    pub(super) fn channels_last(&self) -> bool {
        self.loader.channels_last
    }

    pub(super) fn use_channels_first(&self, why: &str) -> bool {
        self.loader.optimised.as_ref().is_some_and(|optimised| optimised.use_channels_first(why))
    }

    /// Returns one session for each arena. Sessions with the same arena report the same memory, so
    /// one is enough.
    pub(super) fn arenas(&self) -> impl Iterator<Item = &OnnxSession> {
        self.arenas.iter().map(|&index| &self.all[index])
    }

    pub(super) fn is_warming(&self) -> bool {
        matches!(self.phase, Phase::Warming(_))
    }

    pub(super) fn finish_warm_up(&mut self, bound: &[BoundBatch]) -> Result<(), BootRefusal> {
        let Phase::Warming(sharing) = self.phase else { return Ok(()) };
        let recorded = bound.iter().any(|bound| matches!(bound.how, ExecutionMode::Recorded(_)));
        let spare = (sharing == Sharing::Fixed || !recorded).then_some(0);
        self.phase = Phase::Done { spare };
        if spare.is_none() && self.shapes_vary(bound) {
            // The spare session is loaded now, so that the first batch of a new form does not wait
            // for the load.
            self.spare().map_err(|failure| BootRefusal::Setup(failure.to_string()))?;
        }
        Ok(())
    }

    pub(super) fn of(
        &mut self,
        shapes: &InputShapes,
        bound: &[BoundBatch],
    ) -> Result<SessionRef, RunFailure> {
        let alike = |bound: &&BoundBatch| bound.shapes == *shapes;
        let known = bound.iter().find(alike).map(|bound| bound.session);
        let recordable = |index| SessionRef { index, recordable: true };
        let plain = |index| SessionRef { index, recordable: false };
        match self.phase {
            Phase::Warming(Sharing::All) => Ok(recordable(0)),
            Phase::Warming(Sharing::Shape) => match known {
                Some(session) => Ok(session),
                None if bound.is_empty() => Ok(recordable(0)),
                None => {
                    self.load_another(Fallback::Allowed, &Lengths::new(), Scratch::Shared).map(recordable)
                }
            },
            Phase::Warming(Sharing::Fixed) => {
                let lengths = lengths(&self.all[0].session, shapes);
                let fixed = match (known, lengths) {
                    (Some(session), _) => Some(session),
                    // Even with fixed lengths, a session may still need the host's CPU for some
                    // operators.
                    (None, Some(lengths)) => {
                        match self.load_another(Fallback::Forbidden, &lengths, Scratch::Shared) {
                            Ok(index) => Some(recordable(index)),
                            Err(failure) => {
                                self.host_fallback_reason = Some(failure.to_string());
                                None
                            }
                        }
                    }
                    (None, None) => None,
                };
                Ok(fixed.unwrap_or(plain(0)))
            }
            Phase::Done { .. } => self.spare().map(plain),
        }
    }

    fn spare(&mut self) -> Result<usize, RunFailure> {
        if let Phase::Done { spare: Some(spare) } = self.phase {
            return Ok(spare);
        }
        let spare = self.load_another(Fallback::Allowed, &Lengths::new(), Scratch::Own)?;
        self.phase = Phase::Done { spare: Some(spare) };
        Ok(spare)
    }

    fn shapes_vary(&self, bound: &[BoundBatch]) -> bool {
        let batched = bound.iter().any(|bound| bound.shapes.rows.is_some());
        let mut inputs = self.all[0].session.inputs().iter();
        inputs.any(|input| match input.dtype() {
            ValueType::Tensor { shape, .. } => {
                shape.iter().skip(usize::from(batched)).any(|&length| length < 0)
            }
            _ => false,
        })
    }

    fn load_another(
        &mut self,
        fallback: Fallback,
        lengths: &Lengths,
        scratch: Scratch,
    ) -> Result<usize, RunFailure> {
        let scratch = self.loader.scratch(scratch);
        let loaded = self.loader.session(fallback, lengths, scratch);
        let (session, _) = loaded.map_err(|refusal| RunFailure::Engine(refusal.to_string()))?;
        if scratch == Scratch::Own || !std::mem::replace(&mut self.has_shared_arena, true) {
            self.arenas.push(self.all.len());
        }
        self.all.push(session);
        Ok(self.all.len() - 1)
    }
}

impl Drop for Sessions {
    fn drop(&mut self) {
        self.clear();
    }
}
