//! A model that the program around this library runs, such as a Python interpreter.

use std::fmt::Debug;
use std::path::Path;

use serde::{Deserialize, Serialize};
use shadowslice_shared::batch::RunFailure;
use shadowslice_shared::boot::BootRefusal;

use super::{EngineAnswer, Signature};
use crate::answer::AnswerSlot;
use crate::inputs::Inputs;

/// What the host is told before it loads a model.
#[derive(Debug, Clone, Copy)]
pub struct LoadRequest<'a> {
    /// The model's name.
    pub name: &'a str,
    pub path: &'a Path,
    /// The only folder for files of the model's own, if there is one.
    pub cache: Option<&'a Path>,
    /// Whether the model is to compute on the GPU that this process has.
    pub on_gpu: bool,
}

/// What a model's proof goes by, besides the reference answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProofBasis {
    /// Whether the same input always has the same answer.
    pub deterministic: bool,
    /// In place of values that are made up, in the order of the model's inputs.
    pub inputs: Option<Vec<GivenInput>>,
}

/// An input of one row; of one request, if the model has no batch axis.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GivenInput {
    /// Whole.
    pub shape: Vec<i64>,
    pub bytes: Vec<u8>,
}

impl Default for ProofBasis {
    fn default() -> Self {
        Self { deterministic: true, inputs: None }
    }
}

/// What a host has recorded for batches of some shape. Its parts live as long as the host.
#[derive(Debug)]
pub struct HostRecording {
    /// A `CUgraph`, by its handle.
    pub graph: usize,
    /// Where the recording reads each input, on the GPU.
    pub inputs: Vec<usize>,
    pub outputs: Vec<RecordedOutput>,
}

/// An output of a recording, in one piece on the GPU.
#[derive(Debug)]
pub struct RecordedOutput {
    /// Without the batch axis.
    pub shape: Vec<i64>,
    pub address: usize,
    /// Bytes of a row; of all, if the model has no batch axis.
    pub row: usize,
}

/// Called by the one thread that serves.
pub trait ModelHost: Debug + Send {
    fn load(&mut self, setting: LoadRequest<'_>) -> Result<Signature, BootRefusal>;

    /// Called only where the reference answers are computed. From now on `run` gives these.
    fn basis(&mut self) -> Result<ProofBasis, BootRefusal>;

    /// From now on inputs lie in memory that stays as long as the process serves.
    fn warmed_up(&mut self);

    /// Whether a batch can be run on a stream that it is given; else why not.
    fn check_movable(&self) -> Result<(), String>;

    /// Whether the model runs on this CUDA stream, by what it was proved with; else why not.
    fn try_on(&mut self, cuda: usize) -> Result<(), String>;

    /// Returns when the answer is in the slot. On the GPU the model computes on this CUDA stream, by
    /// its handle, or on any if there is none. If there is more, the batch's id is that of a stream
    /// of answers from then on.
    fn run(
        &mut self,
        inputs: &Inputs<'_>,
        slot: &mut AnswerSlot<'_>,
        cuda: Option<usize>,
    ) -> Result<EngineAnswer, RunFailure>;

    /// Records what `run` does on the GPU with inputs of these shapes, which it has run before. `None`
    /// if the model is not to be recorded.
    fn record(&mut self, shapes: &[Vec<i64>]) -> Result<Option<HostRecording>, RunFailure>;

    /// The next answer of a stream, as [`Self::run`]. After the last one, and after a failure, there
    /// is no such stream any more.
    fn step(
        &mut self,
        stream: u64,
        slot: &mut AnswerSlot<'_>,
        cuda: Option<usize>,
    ) -> Result<EngineAnswer, RunFailure>;

    /// Returns whether what failed last may come of values that were made up.
    fn may_need_warmup(&self) -> bool;

    /// Nothing more is wanted of a stream, if it is still there.
    fn close(&mut self, stream: u64);

    /// A stream is of no use for a while: what is kept for it can go.
    fn left(&mut self);
}
