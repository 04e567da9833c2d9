//! The engines that run a model. An engine takes a checked batch, and writes the answer into the
//! batch's slot.

mod echo;
mod fetch;
mod host;
mod hosted;
mod hosted_sleep;
mod hosted_steps;
mod onnxruntime;
mod recorded;
mod shapes;

use std::fmt::Debug;
use std::ops::{Deref, DerefMut};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use shadowslice_shared::batch::{
    BatchOutput, PartitionReply, RunFailure, SleepReply, StreamLimits, StreamStep,
};
use shadowslice_shared::boot::{BootRefusal, EngineSpec, WarmUpReport};
use shadowslice_shared::groups::{Division, Groups};
use shadowslice_shared::tensor::TensorSpec;

use crate::answer::AnswerSlot;
use crate::device::cuda::{CudaError, CudaGpu};
use crate::inputs::Inputs;
use echo::EmulatedEngine;
pub use host::{HostRecording, LoadRequest, ModelHost, ProofBasis, RecordedOutput, Seats, TensorData};
pub use hosted::Hosted;
pub use onnxruntime::Library;
use onnxruntime::OnnxSession;
use onnxruntime::RetainedModel;
pub use onnxruntime::{Constants, GpuEngine, GpuSettings, try_libraries};
use shadowslice_shared::errors::chain;

/// An engine that runs a model. The methods with a body are for engines that need no more, such as
/// one that runs on the CPU.
pub trait Engine: Debug {
    /// Runs a batch, and returns when the answer is in the slot.
    fn run(&mut self, inputs: &Inputs<'_>, slot: &mut AnswerSlot<'_>) -> Result<EngineAnswer, RunFailure>;

    /// Returns the next answer of each stream of a step.
    fn step(&mut self, step: &StreamStep, _slot: &mut AnswerSlot<'_>) -> Vec<StreamResult> {
        let why = "the model has no streams";
        step.streams.iter().map(|_| Err(RunFailure::BadBatch(why.to_owned()))).collect()
    }

    /// Closes a stream if it is still open.
    fn close(&mut self, _stream: u64) {}

    /// Returns the time that a batch took, or `None` if no GPU measured the time. Call this after
    /// [`Self::run`].
    fn execution_time(&self, _slot: u8) -> Option<Duration> {
        None
    }

    /// Adds facts about the model on the GPU to the report of a warm-up.
    fn describe(&self, _report: &mut WarmUpReport) {}

    /// Returns true if the model's convolutions use the layout with channels last.
    fn channels_last(&self) -> bool {
        false
    }

    /// Writes a file that makes later workers load the model with channels first. Returns false if
    /// the file cannot be written.
    fn use_channels_first(&self, _why: &str) -> bool {
        false
    }

    /// Records batches of this size if recordings make them faster. Batches of all sizes must have
    /// run before the first recording.
    fn record(&mut self, _size: u32) -> Result<(), RunFailure> {
        Ok(())
    }

    fn finish_warm_up(&mut self) -> Result<(), BootRefusal> {
        Ok(())
    }

    /// Returns the properties of the model on which its proof is based. Only a reference worker
    /// calls this, before it computes the first answer.
    fn basis(&mut self) -> Result<ProofBasis, BootRefusal> {
        Ok(ProofBasis::default())
    }

    /// Returns the advice for answers that differ from the reference answers. A model that is not
    /// deterministic may still be correct.
    fn advice_on_difference(&self) -> &'static str {
        ""
    }

    /// Returns advice for a failure on made-up values. The advice is empty if the values did not
    /// cause the failure. Returns `None` for engines that take their values from the configuration.
    fn advice_on_failure(&self) -> Option<&'static str> {
        None
    }

    /// Returns an error with the reason unless all batches can run on partitions.
    fn check_movable(&self, _inputs: &[TensorSpec], _batched: bool) -> Result<(), String> {
        Ok(())
    }

    /// Returns the division of the GPU, or `None` if batches do not run on groups of a real GPU's
    /// SMs.
    fn division(&self) -> Option<&Division> {
        None
    }

    /// Prepares a partition. Returns `None` if the result becomes available later. An engine that
    /// does not run on specific SMs returns the result immediately.
    fn prepare(&mut self, groups: Groups) -> Option<PartitionReply> {
        Some(PartitionReply { groups, result: Ok(()) })
    }

    /// Returns true if batches with this number of rows run on the partition, which must be ready.
    /// Otherwise, these batches run on the whole GPU.
    fn fits(&self, _groups: Groups, _rows: u32) -> bool {
        true
    }

    /// Returns an error with the reason if the model does not run on these groups, whose partition
    /// must be ready. Only a hosted model makes a trial run. For the other engines, the proof has
    /// already shown that the model runs on all groups.
    fn try_on(&mut self, _groups: Groups) -> Result<(), String> {
        Ok(())
    }

    /// Stops using a partition. `in_use` is true if a batch is running on it.
    fn forget(&mut self, _groups: Groups, _in_use: bool) {}

    /// Returns an error with the reason if the model cannot release its weights on any device.
    fn check_release(&self) -> Result<(), String> {
        Ok(())
    }

    /// Returns the size in bytes of the GPU memory that the model releases while it sleeps, or the reason
    /// why it cannot sleep.
    fn sleep_bytes(&self) -> Result<u64, String> {
        Err("only ONNX and PyTorch models on a CUDA GPU can release their weights".to_owned())
    }

    /// Releases the model's weights on the GPU, which must have finished all batches. `pin` is true if
    /// the weights may stay in host memory from which the GPU copies directly. The caller measures the
    /// time.
    fn sleep(&mut self, _pin: bool) -> Result<SleepReply, String> {
        Err(self.sleep_bytes().err().unwrap_or_default())
    }

    /// Brings the weights back. If this fails, the model still sleeps.
    fn wake(&mut self) -> Result<(), String> {
        Ok(())
    }
}

/// The engine that runs the worker's model.
#[derive(Debug)]
pub enum ModelEngine {
    Emulated(EmulatedEngine),
    /// ONNX Runtime on the host's CPU.
    OnnxRuntime(Box<OnnxSession>),
    OnGpu(Box<GpuEngine>),
    Hosted(Box<Hosted>),
}

impl Deref for ModelEngine {
    type Target = dyn Engine;

    fn deref(&self) -> &Self::Target {
        match self {
            Self::Emulated(engine) => engine,
            Self::OnnxRuntime(engine) => &**engine,
            Self::OnGpu(engine) => &**engine,
            Self::Hosted(engine) => &**engine,
        }
    }
}

impl DerefMut for ModelEngine {
    fn deref_mut(&mut self) -> &mut Self::Target {
        match self {
            Self::Emulated(engine) => engine,
            Self::OnnxRuntime(engine) => &mut **engine,
            Self::OnGpu(engine) => &mut **engine,
            Self::Hosted(engine) => &mut **engine,
        }
    }
}

/// Loads the library of an engine, if the engine has one. If `gpu` is true, also loads the
/// libraries that compute on GPUs. Loading does not access the GPU.
pub fn load_library(spec: &EngineSpec, gpu: bool) -> Result<Option<Library>, BootRefusal> {
    let EngineSpec::OnnxRuntime { library, path, optimised, .. } = spec else { return Ok(None) };
    if let Some(cache) = optimised.as_deref().filter(|_| gpu) {
        onnxruntime::prepare(path, cache);
    }
    Library::load(library, gpu).map(Some)
}

/// Loads ONNX Runtime's library for the models of a shared worker.
pub(crate) fn load_shared_library(library: &Path, gpu: bool) -> Result<Library, BootRefusal> {
    if gpu {
        onnxruntime::prepare_shared();
    }
    Library::load(library, gpu)
}

/// The inputs and outputs of a model, with their complete shapes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signature {
    pub inputs: Vec<TensorSpec>,
    /// The inputs that a request can omit. They have no batch axis.
    pub optional: Vec<TensorSpec>,
    pub outputs: Vec<TensorSpec>,
    /// The number of streams that the model can generate, or `None` if it gives one answer per request.
    pub streams: Option<StreamLimits>,
}

impl Signature {
    /// Returns the required inputs and the optional inputs, which a request can omit.
    pub fn all_inputs(&self) -> (&[TensorSpec], &[TensorSpec]) {
        (&self.inputs, &self.optional)
    }
}

/// An engine's answer to a batch, or one answer of several in a stream.
#[derive(Debug)]
pub struct EngineAnswer {
    /// The outputs. The list is empty if a stream ended without another answer, or if its next answer needs
    /// another step.
    pub outputs: Vec<BatchOutput>,
    /// True if more answers of the same stream follow.
    pub more: bool,
}

/// The answer of one stream in a step. A stream that fails has ended.
pub type StreamResult = Result<EngineAnswer, RunFailure>;

impl EngineAnswer {
    fn complete(outputs: Vec<BatchOutput>) -> Self {
        Self { outputs, more: false }
    }
}

/// The resources that the caller gives to an engine.
#[derive(Debug)]
pub struct EngineResources<'a> {
    pub gpu: Option<Arc<CudaGpu>>,
    /// The socket over which worker and supervisor exchange the model's weights.
    pub weights: Option<OwnedFd>,
    pub host: Option<Box<dyn ModelHost>>,
    pub partitioned: bool,
    /// True if other models run in the same process.
    pub is_shared: bool,
    pub model: &'a str,
}

impl ModelEngine {
    pub fn load(
        spec: &EngineSpec,
        library: Option<&Library>,
        EngineResources { gpu, weights, host, partitioned, is_shared, model }: EngineResources<'_>,
    ) -> Result<(Self, Signature), BootRefusal> {
        match spec {
            EngineSpec::Emulated { tensors, batched } => {
                Ok((Self::Emulated(EmulatedEngine), echo::signature(tensors, *batched)))
            }
            EngineSpec::Python { path, cache, step_timeout, .. } => {
                let no_host = || BootRefusal::Setup("this program cannot run Python models".to_owned());
                let host = host.ok_or_else(no_host)?;
                let (cache, on_gpu, step_timeout) = (cache.as_deref(), gpu.is_some(), *step_timeout);
                let request = LoadRequest { name: model, path, cache, on_gpu, step_timeout };
                let (hosted, signature) = Hosted::load(host, request, gpu.as_ref(), partitioned)?;
                Ok((Self::Hosted(Box::new(hosted)), signature))
            }
            EngineSpec::OnnxRuntime { path, threads, providers, optimised, .. } => {
                let unloaded = || BootRefusal::Setup("ONNX Runtime's library is not loaded".to_owned());
                let library = library.ok_or_else(unloaded)?;
                if let Some(gpu) = gpu {
                    let retained = RetainedModel { folder: optimised.as_deref(), weights };
                    let settings = GpuSettings { threads: *threads, providers, partitioned, is_shared };
                    let (engine, signature) = GpuEngine::load(library, path, retained, settings, gpu)?;
                    return Ok((Self::OnGpu(Box::new(engine)), signature));
                }
                let (engine, signature) = OnnxSession::load(library, path, *threads)?;
                Ok((Self::OnnxRuntime(Box::new(engine)), signature))
            }
        }
    }
}

/// Converts a CUDA error to the failure of a batch.
fn cuda_failure(fault: &CudaError) -> RunFailure {
    RunFailure::Engine(chain(fault))
}
