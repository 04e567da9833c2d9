//! A batch that a host has recorded as a CUDA graph. The worker replays the graph without calling
//! the host.
#![allow(unsafe_code)] // This module copies between slabs and the recording's tensors.

use std::ptr::NonNull;

use shadowslice_shared::batch::{BatchOutput, RunFailure, StreamStep};

use super::fetch::{bring, fetch};
use super::host::{HostRecording, RecordedOutput, Seats};
use super::shapes::InputShapes;
use super::{EngineAnswer, StreamResult, cuda_failure};
use crate::answer::AnswerSlot;
use crate::device::cuda::graph::{Executable, MoveError, Recording, UploadStream};
use crate::device::cuda::partition::PartitionStream;
use crate::device::cuda::{CudaError, CudaGpu};
use crate::inputs::Inputs;

/// A host's recording that is ready to run.
#[derive(Debug)]
pub(super) struct RecordedGraph {
    shapes: InputShapes,
    inputs: Vec<NonNull<u8>>,
    outputs: Vec<RecordedOutput>,
    recording: Recording,
    whole: Executable,
}

impl RecordedGraph {
    /// Makes the host record batches of these shapes. `record` calls the host with the shapes,
    /// including the batch axis. Returns `None` if the host does not record them.
    pub(super) fn new(
        gpu: &CudaGpu,
        shapes: InputShapes,
        record: impl FnOnce(&[Vec<i64>]) -> Result<Option<HostRecording>, RunFailure>,
    ) -> Result<Option<Self>, RunFailure> {
        let Some(HostRecording { graph, inputs, outputs }) = record(&shapes.with_batch_axis())? else {
            return Ok(None);
        };
        // SAFETY: the host keeps its recordings and does not change them.
        let recording = unsafe { gpu.copy_recording(graph) }.map_err(|fault| cuda_failure(&fault))?;
        let recording = gpu.cut(recording).map_err(|fault| cuda_failure(&fault))?;
        let whole = recording.instantiate().map_err(|fault| cuda_failure(&fault))?;
        let inputs = inputs.into_iter().map(pointer).collect();
        Ok(Some(Self { shapes, inputs, outputs, recording, whole }))
    }

    pub(super) fn check_movable(&self) -> Result<(), MoveError> {
        self.recording.check_movable()
    }

    pub(super) fn instantiate_on(
        &mut self,
        partition: &PartitionStream,
        uploads: &UploadStream,
    ) -> Result<Executable, CudaError> {
        self.recording.instantiate_on(partition.context(), uploads)
    }

    /// Runs a batch, and returns when the answer is in the slot. `partition` is this recording's
    /// executable on the batch's partition, or `None` for the whole GPU.
    pub(super) fn run(
        &self,
        gpu: &CudaGpu,
        partition: Option<&Executable>,
        inputs: &Inputs<'_>,
        slot: &mut AnswerSlot<'_>,
    ) -> Result<EngineAnswer, RunFailure> {
        for (input, &place) in self.inputs.iter().enumerate() {
            let parts = (0..inputs.requests()).map(|request| inputs.part(request, input));
            // SAFETY: the buffer has space for at least this number of rows of this shape. A batch
            // runs only after the previous batch has ended. The parts stay in the slab until the
            // batch is answered.
            unsafe { bring(parts, place, gpu) }.map_err(|fault| cuda_failure(&fault))?;
        }
        gpu.start(inputs.slot()).map_err(|fault| cuda_failure(&fault))?;
        gpu.replay(partition.unwrap_or(&self.whole)).map_err(|fault| cuda_failure(&fault))?;
        let outputs = self.outputs.iter().map(|RecordedOutput { shape, address, row }| {
            // SAFETY: the output has as many rows as the recording, and the batch has no more rows
            // than that. Only the recording writes to the output.
            unsafe { fetch(shape, *row, pointer(*address), inputs, gpu, slot) }
        });
        let outputs = outputs.collect::<Result<_, _>>()?;
        gpu.finish(inputs.slot()).map_err(|fault| cuda_failure(&fault))?;
        Ok(EngineAnswer::complete(outputs))
    }

    /// Runs a step of streams, padded to the recorded number of streams.
    pub(super) fn step(
        &self,
        gpu: &CudaGpu,
        partition: Option<&Executable>,
        step: &StreamStep,
        Seats { seats, spare }: &Seats,
    ) -> Result<RecordedStep<'_>, RunFailure> {
        let rows = self.shapes.rows() as usize;
        let padded = seats.iter().chain(std::iter::repeat(spare)).take(rows);
        let seats: Vec<u8> = padded.flat_map(|seat| seat.to_le_bytes()).collect();
        let failed = |fault| cuda_failure(&fault);
        for &place in &self.inputs {
            // SAFETY: the buffer has space for a seat of each recorded stream. `seats` lives until the
            // copies have ended.
            unsafe { bring(std::iter::once(&seats[..]), place, gpu) }.map_err(failed)?;
        }
        gpu.start(step.slot).map_err(failed)?;
        gpu.replay(partition.unwrap_or(&self.whole)).map_err(failed)?;
        let mut contents = self.contents(gpu).map_err(failed)?;
        gpu.finish(step.slot).map_err(failed)?;
        let (pending, ended) = (contents.pop().unwrap_or_default(), contents.pop().unwrap_or_default());
        Ok(RecordedStep { outputs: &self.outputs, contents, ended, pending })
    }

    /// Returns the number of rows of the recorded batch.
    pub(super) fn rows(&self) -> u32 {
        self.shapes.rows()
    }

    /// Replays the recording with the inputs that its tensors contain, and returns its outputs.
    pub(super) fn replay(&self, gpu: &CudaGpu) -> Result<Vec<Vec<u8>>, CudaError> {
        gpu.replay(&self.whole)?;
        self.contents(gpu)
    }

    /// Waits for the end of a replay, and returns its outputs.
    fn contents(&self, gpu: &CudaGpu) -> Result<Vec<Vec<u8>>, CudaError> {
        let rows = self.shapes.rows() as usize;
        let mut contents: Vec<_> = self.outputs.iter().map(|output| vec![0_u8; output.row * rows]).collect();
        for (output, content) in self.outputs.iter().zip(&mut contents) {
            let to = NonNull::new(content.as_mut_ptr()).expect("a vector has an address");
            // SAFETY: the output has this number of bytes. The copy ends before this function returns.
            unsafe { gpu.copy_out(pointer(output.address), to, content.len()) }?;
        }
        gpu.synchronize()?;
        Ok(contents)
    }
}

/// The outputs of a recorded step.
#[derive(Debug)]
pub(super) struct RecordedStep<'r> {
    outputs: &'r [RecordedOutput],
    /// The bytes of each output, for all streams.
    contents: Vec<Vec<u8>>,
    /// The byte of each stream, which is not 0 if the stream has ended.
    ended: Vec<u8>,
    /// The byte of each stream, which is not 0 if its next answer needs another step.
    pending: Vec<u8>,
}

impl RecordedStep<'_> {
    /// Writes the answer of the stream in this row of the step to the slot.
    pub(super) fn answer(&self, row: usize, slot: &mut AnswerSlot<'_>) -> StreamResult {
        let more = self.ended.get(row) == Some(&0);
        if self.pending.get(row) != Some(&0) {
            return Ok(EngineAnswer { outputs: Vec::new(), more });
        }
        slot.put_stream(|slot| {
            let outputs = self.outputs.iter().zip(&self.contents).map(|(output, content)| {
                let bytes = &content[row * output.row..(row + 1) * output.row];
                BatchOutput { shape: output.shape.clone(), parts: vec![slot.put(bytes)] }
            });
            EngineAnswer { outputs: outputs.collect(), more }
        })
    }
}

/// Returns the index of the smallest recording into which a step of `streams` streams fits.
pub(super) fn fitting_step(recorded: &[RecordedGraph], streams: usize) -> Option<usize> {
    let fits = recorded.iter().enumerate().filter(|(_, recorded)| recorded.shapes.rows() as usize >= streams);
    fits.min_by_key(|(_, recorded)| recorded.shapes.rows()).map(|(index, _)| index)
}

/// Returns the index of the smallest recording into which the batch fits.
pub(super) fn fitting(recorded: &[RecordedGraph], inputs: &Inputs<'_>) -> Option<usize> {
    let shapes = InputShapes::of(inputs);
    let fits = recorded.iter().enumerate().filter(|(_, recorded)| recorded.shapes.holds(&shapes));
    fits.min_by_key(|(_, recorded)| recorded.shapes.rows).map(|(index, _)| index)
}

/// Converts a tensor's address to a pointer. A tensor without elements may have no address, but its
/// bytes are never copied.
fn pointer(address: usize) -> NonNull<u8> {
    NonNull::new(std::ptr::with_exposed_provenance_mut(address)).unwrap_or(NonNull::dangling())
}
