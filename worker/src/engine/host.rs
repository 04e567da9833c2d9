//! The interface to a program that runs models with this library, such as a Python interpreter.

use std::fmt::Debug;
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use shadowslice_shared::batch::RunFailure;
use shadowslice_shared::boot::BootRefusal;
use shadowslice_shared::compare::ComparedTensor;

use super::{EngineAnswer, Signature, StreamResult};
use crate::answer::AnswerSlot;
use crate::inputs::Inputs;

/// The parameters with which a host loads a model.
#[derive(Debug, Clone, Copy)]
pub struct LoadRequest<'a> {
    pub name: &'a str,
    pub path: &'a Path,
    /// The only folder to which the model can write files, or `None` if it cannot write any.
    pub cache: Option<&'a Path>,
    /// True if the model computes on the GPU of this process.
    pub on_gpu: bool,
    /// The time after which the host interrupts a step of streams.
    pub step_timeout: Duration,
}

/// The properties of a model on which its proof is based, in addition to the reference answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProofBasis {
    /// True if the same input always produces the same answer.
    pub deterministic: bool,
    /// The inputs that the model supplies instead of made-up values, in the order of the model's
    /// inputs. If the model has a batch axis, the shapes include it, and each input has one row.
    pub inputs: Option<Vec<TensorData>>,
}

/// A tensor of the proof.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorData {
    pub shape: Vec<i64>,
    pub bytes: Vec<u8>,
}

impl TensorData {
    /// Returns the tensor for a comparison.
    pub(crate) fn view(&self) -> ComparedTensor<'_> {
        ComparedTensor { shape: &self.shape, bytes: &self.bytes }
    }
}

impl Default for ProofBasis {
    fn default() -> Self {
        Self { deterministic: true, inputs: None }
    }
}

/// A batch that a host has recorded. The graph and its tensors exist until the host is dropped.
#[derive(Debug)]
pub struct HostRecording {
    /// The handle of a `CUgraph`.
    pub graph: usize,
    /// The addresses on the GPU from which the recording reads the inputs.
    pub inputs: Vec<usize>,
    pub outputs: Vec<RecordedOutput>,
}

/// The seats of the streams in a recorded step.
#[derive(Debug)]
pub struct Seats {
    /// The seat of each stream.
    pub seats: Vec<i64>,
    /// A seat that no stream uses. A recording of more streams runs on this seat, too.
    pub spare: i64,
}

/// An output of a recording. Its bytes are contiguous on the GPU.
#[derive(Debug)]
pub struct RecordedOutput {
    /// The shape without the batch axis.
    pub shape: Vec<i64>,
    pub address: usize,
    /// The number of bytes in a row, or in the output if the model has no batch axis.
    pub row: usize,
}

/// A program that runs models. Only the thread that serves calls this trait's methods.
pub trait ModelHost: Debug + Send {
    fn load(&mut self, request: LoadRequest<'_>) -> Result<Signature, BootRefusal>;

    /// Returns the properties of the model on which its proof is based. Only a reference worker
    /// calls this. It then computes the reference answers with `run`.
    fn basis(&mut self) -> Result<ProofBasis, BootRefusal>;

    /// Tells the host that all further inputs lie in memory that stays mapped while the process
    /// serves.
    fn finish_warm_up(&mut self);

    /// Returns an error with the reason if batches cannot run on a CUDA stream that the caller
    /// chooses.
    fn check_movable(&self) -> Result<(), String>;

    /// Runs the model on the inputs of the proof, on this CUDA stream. Returns an error with the
    /// reason if the run fails.
    fn try_on(&mut self, cuda: usize) -> Result<(), String>;

    /// Runs a batch, and returns when the answer is in the slot. On the GPU, the model computes on
    /// the CUDA stream with the handle `cuda`, or on any stream if `cuda` is `None`. If `more` is set
    /// in the answer, the batch opened a stream with the batch's id.
    fn run(
        &mut self,
        inputs: &Inputs<'_>,
        slot: &mut AnswerSlot<'_>,
        cuda: Option<usize>,
    ) -> Result<EngineAnswer, RunFailure>;

    /// Records the work that `run` does on the GPU for inputs of these shapes. A batch with these
    /// shapes must have run before. For a model with streams, records a step instead. Its only input are the
    /// seats of the streams. Its last two outputs have a byte for each stream: not 0 if the stream has ended,
    /// and not 0 if its next answer needs another step. Returns `None` if the host does not record the
    /// model.
    fn record(&mut self, shapes: &[Vec<i64>]) -> Result<Option<HostRecording>, RunFailure>;

    /// Returns the next answer of each stream, in the same way as [`Self::run`]. An answer that does not
    /// fit into the slot fails, and leaves its room to the other answers.
    fn step(&mut self, streams: &[u64], slot: &mut AnswerSlot<'_>, cuda: Option<usize>) -> Vec<StreamResult>;

    /// Returns the seats of these streams, which a recorded step uses as indices into its tensors. Returns
    /// `None` if the host does not record steps.
    fn seats(&mut self, streams: &[u64]) -> Option<Seats>;

    /// Ends the streams whose recorded step has given their last answer.
    fn end_streams(&mut self, streams: &[u64]);

    /// Returns true if made-up input values may have caused the last failure.
    fn may_need_warmup(&self) -> bool;

    /// Closes a stream if it is still open.
    fn close(&mut self, stream: u64);

    /// Returns an error with the reason if the host does not allocate the model's GPU memory in the arena of
    /// the thread.
    fn check_arena(&self) -> Result<(), String>;

    /// Returns the addresses in the arena whose content the model needs.
    fn arena_content(&self) -> Result<Vec<Range<u64>>, String>;

    /// Tells the host that a partition will not be used for some time. The host can then free the
    /// memory that it holds for the partition's stream.
    fn release_partition(&mut self);
}
