//! The engines that run a model. An engine takes a checked batch, and writes the answer into the
//! batch's slot.

mod echo;
mod fetch;
mod host;
mod hosted;
mod onnxruntime;
mod recorded;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use shadowslice_shared::batch::{BatchOutput, PartitionReply, RunFailure, StreamStep};
use shadowslice_shared::boot::{BootRefusal, DeviceMemory, EngineSpec};
use shadowslice_shared::groups::Groups;
use shadowslice_shared::tensor::TensorSpec;

use crate::answer::AnswerSlot;
use crate::device::cuda::{CudaError, CudaGpu};
use crate::inputs::Inputs;
pub use host::{GivenInput, HostRecording, LoadRequest, ModelHost, ProofBasis, RecordedOutput};
pub use hosted::Hosted;
use onnxruntime::RetainedModel;
pub use onnxruntime::{Constants, GpuEngine, try_libraries};
use onnxruntime::{Library, OnnxSession};
use shadowslice_shared::errors::chain;

/// The engine that runs the worker's model.
#[derive(Debug)]
pub enum ModelEngine {
    Emulated,
    /// ONNX Runtime on the host's CPU.
    OnnxRuntime(Box<OnnxSession>),
    OnGpu(Box<GpuEngine>),
    Hosted(Hosted),
}

/// The libraries of an engine, which are loaded before the device is known.
#[derive(Debug)]
pub enum Libraries {
    None,
    OnnxRuntime(Library),
}

impl Libraries {
    /// Loads the libraries. If `gpu` is true, also loads the libraries that compute on GPUs.
    /// Loading does not access the GPU.
    pub fn load(spec: &EngineSpec, gpu: bool) -> Result<Self, BootRefusal> {
        match spec {
            EngineSpec::Emulated { .. } | EngineSpec::Python { .. } => Ok(Self::None),
            EngineSpec::OnnxRuntime { library, path, optimised, .. } => {
                if let Some(cache) = optimised.as_deref().filter(|_| gpu) {
                    onnxruntime::prepare(path, cache);
                }
                Library::load(library, gpu).map(Self::OnnxRuntime)
            }
        }
    }
}

/// The inputs and outputs of a model, with their complete shapes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signature {
    pub inputs: Vec<TensorSpec>,
    /// The inputs that a request can omit. They have no batch axis.
    pub optional: Vec<TensorSpec>,
    pub outputs: Vec<TensorSpec>,
    /// The number of streams that the model can generate at the same time; 0 if the model gives one
    /// answer per request.
    pub streams: u32,
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
    pub outputs: Vec<BatchOutput>,
    /// True if more answers of the same stream follow. The last answer of a stream has no outputs.
    pub more: bool,
}

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
    pub model: &'a str,
}

impl ModelEngine {
    pub fn load(
        spec: &EngineSpec,
        libraries: &Libraries,
        EngineResources { gpu, weights, host, partitioned, model }: EngineResources<'_>,
    ) -> Result<(Self, Signature), BootRefusal> {
        match (spec, libraries) {
            (EngineSpec::Emulated { tensors, batched }, _) => {
                Ok((Self::Emulated, echo::signature(tensors, *batched)))
            }
            (EngineSpec::Python { path, cache, .. }, _) => {
                let no_host = || BootRefusal::Setup("this program cannot run Python models".to_owned());
                let host = host.ok_or_else(no_host)?;
                let request =
                    LoadRequest { name: model, path, cache: cache.as_deref(), on_gpu: gpu.is_some() };
                let (hosted, signature) = Hosted::load(host, request, gpu.as_ref(), partitioned)?;
                Ok((Self::Hosted(hosted), signature))
            }
            (
                EngineSpec::OnnxRuntime { path, threads, providers, optimised, .. },
                Libraries::OnnxRuntime(library),
            ) => {
                if let Some(gpu) = gpu {
                    let retained = RetainedModel { folder: optimised.as_deref(), weights };
                    let (engine, signature) =
                        GpuEngine::load(library, path, retained, *threads, providers, gpu, partitioned)?;
                    return Ok((Self::OnGpu(Box::new(engine)), signature));
                }
                let (engine, signature) = OnnxSession::load(library, path, *threads)?;
                Ok((Self::OnnxRuntime(Box::new(engine)), signature))
            }
            (EngineSpec::OnnxRuntime { .. }, Libraries::None) => {
                Err(BootRefusal::Setup("ONNX Runtime's library is not loaded".to_owned()))
            }
        }
    }

    /// Returns true if batches run on groups of a real GPU's SMs.
    pub fn runs_on_groups(&self) -> bool {
        match self {
            Self::Emulated | Self::OnnxRuntime(_) => false,
            Self::Hosted(hosted) => hosted.division().is_some(),
            Self::OnGpu(_) => true,
        }
    }

    /// Returns the time that a batch took, or `None` if no GPU measured the time. Call this after
    /// [`Self::run`].
    pub fn execution_time(&self, slot: u8) -> Option<Duration> {
        match self {
            Self::Emulated | Self::OnnxRuntime(_) | Self::Hosted(_) => None,
            Self::OnGpu(engine) => engine.gpu().execution_time(slot).ok().flatten(),
        }
    }

    pub fn unshared(&self) -> Option<&str> {
        match self {
            Self::Emulated | Self::OnnxRuntime(_) | Self::Hosted(_) => None,
            Self::OnGpu(engine) => engine.unshared(),
        }
    }

    /// Returns true if the model's convolutions use the layout with channels last.
    pub fn channels_last(&self) -> bool {
        matches!(self, Self::OnGpu(engine) if engine.channels_last())
    }

    /// Writes a file that makes later workers load the model with channels first. Returns false if
    /// the file cannot be written.
    pub fn use_channels_first(&self, why: &str) -> bool {
        matches!(self, Self::OnGpu(engine) if engine.use_channels_first(why))
    }

    /// Records batches of this size if recordings make them faster. Batches of all sizes must have
    /// run before this call.
    pub fn record(&mut self, size: u32) -> Result<(), RunFailure> {
        match self {
            Self::Emulated | Self::OnnxRuntime(_) => Ok(()),
            Self::Hosted(hosted) => hosted.record(size),
            Self::OnGpu(engine) => engine.record(size),
        }
    }

    pub fn memory(&self) -> Option<DeviceMemory> {
        match self {
            Self::Emulated | Self::OnnxRuntime(_) | Self::Hosted(_) => None,
            Self::OnGpu(engine) => Some(engine.memory()),
        }
    }

    pub fn finish_warm_up(&mut self) -> Result<(), BootRefusal> {
        match self {
            Self::Emulated | Self::OnnxRuntime(_) => Ok(()),
            Self::Hosted(host) => {
                host.finish_warm_up();
                Ok(())
            }
            Self::OnGpu(engine) => engine.finish_warm_up(),
        }
    }

    /// Returns the properties of the model on which its proof is based. Only a reference worker
    /// calls this, before it computes the first answer.
    pub fn basis(&mut self) -> Result<ProofBasis, BootRefusal> {
        match self {
            Self::Emulated | Self::OnnxRuntime(_) | Self::OnGpu(_) => Ok(ProofBasis::default()),
            Self::Hosted(host) => host.basis(),
        }
    }

    /// Returns the advice for answers that differ from the reference answers. A model that is not
    /// deterministic may still be correct.
    pub fn advice_on_difference(&self) -> &'static str {
        match self {
            Self::Emulated | Self::OnnxRuntime(_) | Self::OnGpu(_) => "",
            Self::Hosted(_) => {
                "; if answers to the same input may differ, write `deterministic = False` in the class"
            }
        }
    }

    /// Returns advice for a failure on made-up values. The advice is empty if the values did not
    /// cause the failure. Returns `None` for engines that take their values from the configuration.
    pub fn advice_on_failure(&self) -> Option<&'static str> {
        match self {
            Self::Emulated | Self::OnnxRuntime(_) | Self::OnGpu(_) => None,
            Self::Hosted(hosted) if hosted.may_need_warmup() => Some(
                "; if the model cannot run on made-up values, add a method `warmup` to its class, or \
                 set `warmup` in its configuration to values or to a file of arrays",
            ),
            Self::Hosted(_) => Some(""),
        }
    }

    /// Returns the number of kernels in a recorded batch, or `None` if no batch was recorded.
    pub fn kernels(&self) -> Option<u32> {
        match self {
            Self::Emulated | Self::OnnxRuntime(_) | Self::Hosted(_) => None,
            Self::OnGpu(engine) => engine.kernels(),
        }
    }

    /// Prepares a partition. Returns `None` if the result becomes available later. An engine that
    /// does not run on specific SMs returns the result immediately.
    pub fn prepare(&mut self, groups: Groups) -> Option<PartitionReply> {
        match self {
            Self::Emulated | Self::OnnxRuntime(_) => Some(PartitionReply { groups, result: Ok(()) }),
            Self::Hosted(hosted) => Some(hosted.prepare(groups)),
            Self::OnGpu(engine) => engine.prepare(groups),
        }
    }

    /// Returns true if batches with this number of rows run on the partition, which must be ready.
    /// Otherwise, these batches run on the whole GPU.
    pub fn fits(&self, groups: Groups, rows: u32) -> bool {
        match self {
            Self::Emulated | Self::OnnxRuntime(_) | Self::Hosted(_) => true,
            Self::OnGpu(engine) => engine.fits(groups, rows),
        }
    }

    /// Returns an error with the reason if the model does not run on these groups, whose partition
    /// must be ready. Only a hosted model makes a trial run. For the other engines, the proof has
    /// already shown that the model runs on all groups.
    pub fn try_on(&mut self, groups: Groups) -> Result<(), String> {
        match self {
            Self::Emulated | Self::OnnxRuntime(_) | Self::OnGpu(_) => Ok(()),
            Self::Hosted(hosted) => hosted.try_on(groups),
        }
    }

    pub fn forget(&mut self, groups: Groups) {
        match self {
            Self::Emulated | Self::OnnxRuntime(_) => {}
            Self::Hosted(hosted) => hosted.forget(groups),
            // No batch is in flight, because a worker with this engine calls this function only
            // before it serves.
            Self::OnGpu(engine) => engine.forget(groups, false),
        }
    }

    pub fn run(
        &mut self,
        inputs: &Inputs<'_>,
        slot: &mut AnswerSlot<'_>,
    ) -> Result<EngineAnswer, RunFailure> {
        let ran = match self {
            Self::Emulated => EngineAnswer::complete(echo::run(inputs, slot)),
            Self::OnnxRuntime(engine) => EngineAnswer::complete(engine.run(inputs, slot)?),
            Self::Hosted(hosted) => hosted.run(inputs, slot)?,
            Self::OnGpu(engine) => {
                let outputs = engine.begin(inputs, slot)?;
                engine.gpu().synchronize().map_err(|fault| RunFailure::Engine(chain(&fault)))?;
                return Ok(EngineAnswer::complete(outputs));
            }
        };
        slot.check().map(|()| ran)
    }

    /// Returns the next answer of a stream.
    pub fn step(&mut self, step: &StreamStep, slot: &mut AnswerSlot<'_>) -> Result<EngineAnswer, RunFailure> {
        let ran = match self {
            Self::Hosted(hosted) => hosted.step(step, slot)?,
            Self::Emulated | Self::OnnxRuntime(_) | Self::OnGpu(_) => return Err(no_stream_failure()),
        };
        slot.check().map(|()| ran)
    }

    /// Closes a stream if it is still open.
    pub fn close(&mut self, stream: u64) {
        if let Self::Hosted(hosted) = self {
            hosted.close(stream);
        }
    }
}

pub(crate) fn no_stream_failure() -> RunFailure {
    RunFailure::BadBatch("the model has no streams".to_owned())
}

/// Converts a CUDA error to the failure of a batch.
fn cuda_failure(fault: &CudaError) -> RunFailure {
    RunFailure::Engine(chain(fault))
}
