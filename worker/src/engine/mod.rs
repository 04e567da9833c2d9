//! What runs a model: takes a checked batch, writes the answer into its slot.

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
use crate::device::cuda::{CudaFault, CudaGpu};
use crate::inputs::Inputs;
pub use host::{Basis, GivenInput, Host, HostRecording, RecordedOutput, Setting};
pub use hosted::Hosted;
use onnxruntime::Kept;
pub use onnxruntime::{Constants, OnGpu, try_libraries};
use onnxruntime::{Library, OnnxRuntime};
use shadowslice_shared::errors::chain;

#[derive(Debug)]
pub enum Engine {
    Emulated,
    /// ONNX Runtime on the host's processor.
    OnnxRuntime(Box<OnnxRuntime>),
    OnGpu(Box<OnGpu>),
    Hosted(Hosted),
}

/// Loaded before the device is known.
#[derive(Debug)]
pub enum Libraries {
    None,
    OnnxRuntime(Library),
}

impl Libraries {
    /// With `gpu` also those that compute on GPUs. No GPU is touched.
    pub fn load(spec: &EngineSpec, gpu: bool) -> Result<Self, BootRefusal> {
        match spec {
            EngineSpec::Emulated { .. } | EngineSpec::Python { .. } => Ok(Self::None),
            EngineSpec::OnnxRuntime { library, path, optimised, .. } => {
                if let Some(kept) = optimised.as_deref().filter(|_| gpu) {
                    onnxruntime::prepare(path, kept);
                }
                Library::load(library, gpu).map(Self::OnnxRuntime)
            }
        }
    }
}

/// With whole shapes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signature {
    pub inputs: Vec<TensorSpec>,
    /// The inputs that a request may leave out. They have no batch axis.
    pub optional: Vec<TensorSpec>,
    pub outputs: Vec<TensorSpec>,
    /// How many streams it generates at a time; 0 for a model that gives one answer to a request.
    pub streams: u32,
}

impl Signature {
    /// Returns the inputs that every request gives, and those that it may leave out.
    pub fn all_inputs(&self) -> (&[TensorSpec], &[TensorSpec]) {
        (&self.inputs, &self.optional)
    }
}

/// An answer: one output after the other.
#[derive(Debug)]
pub struct Ran {
    pub outputs: Vec<BatchOutput>,
    /// Whether it is one of a stream that goes on. At a stream's end there are no outputs.
    pub more: bool,
}

impl Ran {
    fn whole(outputs: Vec<BatchOutput>) -> Self {
        Self { outputs, more: false }
    }
}

/// What an engine may use.
#[derive(Debug)]
pub struct Means<'a> {
    pub gpu: Option<Arc<CudaGpu>>,
    /// The socket over which the model's weights come and go.
    pub weights: Option<OwnedFd>,
    pub host: Option<Box<dyn Host>>,
    pub partitioned: bool,
    /// Its name.
    pub model: &'a str,
}

impl Engine {
    pub fn load(
        spec: &EngineSpec,
        libraries: &Libraries,
        Means { gpu, weights, host, partitioned, model }: Means<'_>,
    ) -> Result<(Self, Signature), BootRefusal> {
        match (spec, libraries) {
            (EngineSpec::Emulated { tensors, batched }, _) => {
                Ok((Self::Emulated, echo::signature(tensors, *batched)))
            }
            (EngineSpec::Python { path, cache, .. }, _) => {
                let no_host = || BootRefusal::Setup("this program runs no Python models".to_owned());
                let host = host.ok_or_else(no_host)?;
                let setting = Setting { name: model, path, cache: cache.as_deref(), on_gpu: gpu.is_some() };
                let (hosted, signature) = Hosted::load(host, setting, gpu.as_ref(), partitioned)?;
                Ok((Self::Hosted(hosted), signature))
            }
            (
                EngineSpec::OnnxRuntime { path, threads, providers, optimised, .. },
                Libraries::OnnxRuntime(library),
            ) => {
                if let Some(gpu) = gpu {
                    let kept = Kept { folder: optimised.as_deref(), weights };
                    let (engine, signature) =
                        OnGpu::load(library, path, kept, *threads, (providers, gpu), partitioned)?;
                    return Ok((Self::OnGpu(Box::new(engine)), signature));
                }
                let (engine, signature) = OnnxRuntime::load(library, path, *threads)?;
                Ok((Self::OnnxRuntime(Box::new(engine)), signature))
            }
            (EngineSpec::OnnxRuntime { .. }, Libraries::None) => {
                Err(BootRefusal::Setup("ONNX Runtime's library was not loaded".to_owned()))
            }
        }
    }

    /// Returns whether batches run on groups of a real GPU's SMs.
    pub fn runs_on_groups(&self) -> bool {
        match self {
            Self::Emulated | Self::OnnxRuntime(_) => false,
            Self::Hosted(hosted) => hosted.division().is_some(),
            Self::OnGpu(_) => true,
        }
    }

    /// `None` if no GPU measured it. The batch must be [through](Self::run).
    pub fn executed(&self, slot: u8) -> Option<Duration> {
        match self {
            Self::Emulated | Self::OnnxRuntime(_) | Self::Hosted(_) => None,
            Self::OnGpu(engine) => engine.gpu().executed(slot).ok().flatten(),
        }
    }

    pub fn unshared(&self) -> Option<&str> {
        match self {
            Self::Emulated | Self::OnnxRuntime(_) | Self::Hosted(_) => None,
            Self::OnGpu(engine) => engine.unshared(),
        }
    }

    /// Whether its convolutions compute with channels last.
    pub fn channels_last(&self) -> bool {
        matches!(self, Self::OnGpu(engine) if engine.channels_last())
    }

    /// Later workers are to load the model with channels first. False if that cannot be noted.
    pub fn put_channels_first(&self, why: &str) -> bool {
        matches!(self, Self::OnGpu(engine) if engine.put_channels_first(why))
    }

    /// Only where recording makes executions cheaper; every size has run before.
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

    pub fn warmed_up(&mut self) -> Result<(), BootRefusal> {
        match self {
            Self::Emulated | Self::OnnxRuntime(_) => Ok(()),
            Self::Hosted(host) => {
                host.warmed_up();
                Ok(())
            }
            Self::OnGpu(engine) => engine.warmed_up(),
        }
    }

    /// Called only where the reference answers are computed, before the first of them.
    pub fn basis(&mut self) -> Result<Basis, BootRefusal> {
        match self {
            Self::Emulated | Self::OnnxRuntime(_) | Self::OnGpu(_) => Ok(Basis::default()),
            Self::Hosted(host) => host.basis(),
        }
    }

    /// What to do about answers that differ from the reference's, where that may be no fault.
    pub fn if_it_differs(&self) -> &'static str {
        match self {
            Self::Emulated | Self::OnnxRuntime(_) | Self::OnGpu(_) => "",
            Self::Hosted(_) => {
                "; if answers to the same input may differ, write `deterministic = False` in the class"
            }
        }
    }

    /// Returns what to do about a failure on made-up values, if those may be at fault. `None` for
    /// engines to which the operator can give values.
    pub fn if_made_up_fails(&self) -> Option<&'static str> {
        match self {
            Self::Emulated | Self::OnnxRuntime(_) | Self::OnGpu(_) => None,
            Self::Hosted(hosted) if hosted.may_need_warmup() => Some(
                "; a model that cannot take made-up values needs a method `warmup`, or values or a \
                 file of arrays as `warmup` of its configuration",
            ),
            Self::Hosted(_) => Some(""),
        }
    }

    /// Returns the number of kernels of a recorded batch, if batches were recorded.
    pub fn kernels(&self) -> Option<u32> {
        match self {
            Self::Emulated | Self::OnnxRuntime(_) | Self::Hosted(_) => None,
            Self::OnGpu(engine) => engine.kernels(),
        }
    }

    /// At once where the engine is not bound to SMs. `None` if the result comes later.
    pub fn prepare(&mut self, groups: Groups) -> Option<PartitionReply> {
        match self {
            Self::Emulated | Self::OnnxRuntime(_) => Some(PartitionReply { groups, result: Ok(()) }),
            Self::Hosted(hosted) => Some(hosted.prepare(groups)),
            Self::OnGpu(engine) => engine.prepare(groups),
        }
    }

    /// Returns whether batches of this many rows run on the partition, which must be ready, rather
    /// than on the whole GPU.
    pub fn fits(&self, groups: Groups, rows: u32) -> bool {
        match self {
            Self::Emulated | Self::OnnxRuntime(_) | Self::Hosted(_) => true,
            Self::OnGpu(engine) => engine.fits(groups, rows),
        }
    }

    /// Whether the model runs on groups that are ready; else why not. Where all groups are alike to an
    /// engine, the proof has shown it.
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
            // While the worker does not serve yet, no batch is on its way.
            Self::OnGpu(engine) => engine.forget(groups, false),
        }
    }

    pub fn run(&mut self, inputs: &Inputs<'_>, slot: &mut AnswerSlot<'_>) -> Result<Ran, RunFailure> {
        let ran = match self {
            Self::Emulated => Ran::whole(echo::run(inputs, slot)),
            Self::OnnxRuntime(engine) => Ran::whole(engine.run(inputs, slot)?),
            Self::Hosted(hosted) => hosted.run(inputs, slot)?,
            Self::OnGpu(engine) => {
                let outputs = engine.begin(inputs, slot)?;
                engine.gpu().synchronize().map_err(|fault| RunFailure::Engine(chain(&fault)))?;
                return Ok(Ran::whole(outputs));
            }
        };
        slot.check().map(|()| ran)
    }

    /// The next answer of a stream.
    pub fn step(&mut self, step: &StreamStep, slot: &mut AnswerSlot<'_>) -> Result<Ran, RunFailure> {
        let ran = match self {
            Self::Hosted(hosted) => hosted.step(step, slot)?,
            Self::Emulated | Self::OnnxRuntime(_) | Self::OnGpu(_) => return Err(no_stream()),
        };
        slot.check().map(|()| ran)
    }

    /// Nothing more is wanted of a stream, if it is still there.
    pub fn close(&mut self, stream: u64) {
        if let Self::Hosted(hosted) = self {
            hosted.close(stream);
        }
    }
}

pub(crate) fn no_stream() -> RunFailure {
    RunFailure::BadBatch("this model has no streams".to_owned())
}

/// A call that the GPU failed fails the batch; synchronising shows whether the GPU can go on at
/// all.
fn broken(fault: &CudaFault) -> RunFailure {
    RunFailure::Engine(chain(fault))
}
