//! The sleep of a model on the GPU: its memory is released, and comes back at the same addresses. After
//! each wake, one batch must give the same answer as before the first sleep.
#![allow(unsafe_code)] // This module releases memory that recordings use.

use shadowslice_shared::batch::SleepReply;
use shadowslice_shared::errors::chain;

use super::bound::{BoundBatch, ExecutionMode, RecordedBatch};
use super::on_gpu::{GpuEngine, size_of};
use super::weights::Released;
use crate::device::cuda::CudaError;
use crate::device::cuda::arena::KeptContent;
use crate::engine::shapes::InputShapes;

/// The proof that the model computes the same after a wake.
#[derive(Debug, Default)]
pub(super) enum WakeProof {
    /// The model has not slept yet.
    #[default]
    Unknown,
    /// The model has no recorded batch whose answer is the same in each run.
    Impossible,
    Batch(ProofBatch),
}

/// The inputs and outputs of a batch.
#[derive(Debug)]
pub(super) struct ProofBatch {
    shapes: InputShapes,
    inputs: Vec<Vec<u8>>,
    outputs: Vec<Vec<u8>>,
    /// The number of sessions that compute the same answers without the content of their scratch memory, or
    /// `None` if some do not.
    without_scratch: Option<usize>,
}

impl GpuEngine {
    /// Returns the size of the memory that the model releases while it sleeps, in bytes.
    pub(super) fn releasable_bytes(&self) -> Result<u64, String> {
        match self.sessions.weights().0 + self.arena.bytes() {
            0 => Err("the model has no memory that the worker can release".to_owned()),
            bytes => Ok(bytes),
        }
    }

    /// Releases the weights and the memory of ONNX Runtime. All batches must have ended.
    pub(super) fn release_memory(&mut self, pin: bool) -> Result<SleepReply, String> {
        let released = self.releasable_bytes()?;
        self.gpu.synchronize().map_err(|fault| chain(&fault))?;
        if matches!(self.wake_proof, WakeProof::Unknown) {
            self.wake_proof = self.prepare_wake_proof().map_err(|fault| chain(&fault))?;
        }
        // SAFETY: all batches have ended, and none starts before `restore_memory`.
        let kept = unsafe { self.arena.release(pin, &self.kept_content()) }.map_err(|fault| chain(&fault))?;
        // SAFETY: as above.
        let weights = unsafe { self.sessions.weights_mut().release(&self.gpu, pin) };
        let Released { pinned, unpinned } = weights.map_err(|error| chain(&error))?;
        Ok(SleepReply { took_us: 0, released, pinned: pinned + kept, unpinned })
    }

    /// Brings the memory back, and proves that the model computes the same as before. If this fails, the
    /// memory stays released.
    pub(super) fn restore_memory(&mut self) -> Result<(), String> {
        self.arena.restore().map_err(|fault| chain(&fault))?;
        let restored = self.sessions.weights_mut().restore(&self.gpu).map_err(|error| chain(&error));
        let proven = restored.and_then(|()| {
            self.gpu.synchronize().map_err(|fault| chain(&fault))?;
            self.prove_wake()
        });
        if proven.is_ok() {
            self.sessions.weights_mut().offer();
        } else {
            self.gpu.synchronize().ok();
            // SAFETY: the copies and the batch of the proof have ended, and no other batch has started.
            unsafe {
                self.arena.release_again();
                self.sessions.weights_mut().release(&self.gpu, true).ok();
            }
        }
        proven
    }

    fn prove_wake(&self) -> Result<(), String> {
        let WakeProof::Batch(ProofBatch { shapes, inputs, outputs, .. }) = &self.wake_proof else {
            return Ok(());
        };
        let batches = self.recorded_batches().find(|(bound, _)| bound.shapes == *shapes);
        let Some((bound, recorded)) = batches else { return Ok(()) };
        let computed = self.compute(bound, recorded, inputs).map_err(|fault| chain(&fault))?;
        match computed == *outputs {
            true => Ok(()),
            false => Err("after the wake, the model computes another answer than before".to_owned()),
        }
    }

    /// Computes the smallest recorded batch twice, with the inputs that its buffers contain.
    fn prepare_wake_proof(&self) -> Result<WakeProof, CudaError> {
        let smallest = self.recorded_batches().min_by_key(|(bound, _)| bound.shapes.rows());
        let Some((bound, recorded)) = smallest else { return Ok(WakeProof::Impossible) };
        let buffers = bound.inputs.iter().zip(&bound.input_bytes);
        let inputs = buffers.map(|(buffer, bytes)| buffer.read(&self.gpu, *bytes));
        let inputs = inputs.collect::<Result<Vec<_>, _>>()?;
        let outputs = self.compute(bound, recorded, &inputs)?;
        if self.compute(bound, recorded, &inputs)? != outputs {
            return Ok(WakeProof::Impossible);
        }
        let (shapes, without_scratch) = (bound.shapes.clone(), self.try_without_scratch()?);
        Ok(WakeProof::Batch(ProofBatch { shapes, inputs, outputs, without_scratch }))
    }

    /// Finds out whether the recorded batches compute the same if their scratch memory is zero. Returns the
    /// number of sessions if all of them do. A session without a recording may store data there.
    fn try_without_scratch(&self) -> Result<Option<usize>, CudaError> {
        let sessions = self.sessions.count();
        let is_recorded = |index| self.all_recorded().any(|(bound, _)| bound.session.index == index);
        if !(0..sessions).all(is_recorded) {
            return Ok(None);
        }
        let outputs = || -> Result<Vec<_>, CudaError> {
            self.all_recorded().map(|(bound, recorded)| self.compute(bound, recorded, &[])).collect()
        };
        let before = outputs()?;
        // SAFETY: all batches have ended, and `outputs` waits for its batches.
        let same = unsafe { self.arena.try_without_scratch(|| Ok(outputs()? == before)) }?;
        Ok(same.then_some(sessions))
    }

    /// Returns the content of the arena that a sleep keeps.
    fn kept_content(&self) -> KeptContent {
        match &self.wake_proof {
            WakeProof::Batch(ProofBatch { without_scratch: Some(sessions), .. })
                if *sessions == self.sessions.count() =>
            {
                KeptContent::Loaded
            }
            _ => KeptContent::All,
        }
    }

    /// Returns the recorded batches of the first slot.
    fn recorded_batches(&self) -> impl Iterator<Item = (&BoundBatch, &RecordedBatch)> {
        self.all_recorded().filter(|(bound, _)| bound.slot == 0)
    }

    /// Returns the recorded batches of all slots. The recordings of the same batch for partitions use the
    /// same data of its session.
    fn all_recorded(&self) -> impl Iterator<Item = (&BoundBatch, &RecordedBatch)> {
        self.bound.iter().filter_map(|bound| match &bound.how {
            ExecutionMode::Recorded(recorded) => Some((bound, recorded)),
            ExecutionMode::Eager(_) => None,
        })
    }

    /// Runs a recorded batch with these inputs, or else with those that its buffers contain, and returns its
    /// outputs.
    fn compute(
        &self,
        bound: &BoundBatch,
        recorded: &RecordedBatch,
        inputs: &[Vec<u8>],
    ) -> Result<Vec<Vec<u8>>, CudaError> {
        for (buffer, content) in bound.inputs.iter().zip(inputs) {
            buffer.write(&self.gpu, content)?;
        }
        self.gpu.replay(&recorded.whole)?;
        let rows = bound.shapes.rows() as usize;
        let specs = self.sessions.at(bound.session).outputs.iter();
        let outputs = specs.zip(&recorded.outputs);
        outputs
            .map(|(spec, output)| output.buffer.read(&self.gpu, output.layout.row * size_of(spec) * rows))
            .collect()
    }
}
