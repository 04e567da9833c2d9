//! What runs a model: takes a checked batch, writes the answer into its slot.

mod echo;
mod onnxruntime;

use std::sync::Arc;
use std::time::Duration;

use shadowslice_shared::batch::{Output, Prepared, RunFailure};
use shadowslice_shared::boot::{BootRefusal, EngineSpec};
use shadowslice_shared::groups::Groups;
use shadowslice_shared::tensor::TensorSpec;

use crate::answer::AnswerSlot;
use crate::device::cuda::CudaGpu;
use crate::inputs::Inputs;
pub use onnxruntime::OnGpu;
use onnxruntime::{Library, OnnxRuntime};
use shadowslice_shared::errors::chain;

/// An engine with its model.
#[derive(Debug)]
pub enum Engine {
    /// Answers with its input.
    Emulated,
    /// ONNX Runtime on the host's processor.
    OnnxRuntime(Box<OnnxRuntime>),
    /// ONNX Runtime on a GPU.
    OnGpu(Box<OnGpu>),
}

/// What an engine needs, loaded before it is known what it runs on.
#[derive(Debug)]
pub enum Libraries {
    /// Nothing.
    None,
    /// ONNX Runtime.
    OnnxRuntime(Library),
}

impl Libraries {
    /// Loads them. With `gpu` those that compute on GPUs too; no GPU is touched.
    pub fn load(spec: &EngineSpec, gpu: bool) -> Result<Self, BootRefusal> {
        match spec {
            EngineSpec::Emulated { .. } => Ok(Self::None),
            EngineSpec::OnnxRuntime { library, .. } => Library::load(library, gpu).map(Self::OnnxRuntime),
        }
    }
}

/// What a model takes and gives, whole shapes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signature {
    /// Its inputs.
    pub inputs: Vec<TensorSpec>,
    /// Its outputs.
    pub outputs: Vec<TensorSpec>,
}

impl Engine {
    /// Loads a model, on the host's processor or on this GPU; with `partitioned` one whose share is a partition inside
    /// the process.
    pub fn load(
        spec: &EngineSpec,
        libraries: &Libraries,
        gpu: Option<Arc<CudaGpu>>,
        partitioned: bool,
    ) -> Result<(Self, Signature), BootRefusal> {
        match (spec, libraries) {
            (EngineSpec::Emulated { tensors, batched }, _) => {
                Ok((Self::Emulated, echo::signature(tensors, *batched)))
            }
            (EngineSpec::OnnxRuntime { path, threads, providers, .. }, Libraries::OnnxRuntime(library)) => {
                if let Some(gpu) = gpu {
                    let (engine, signature) =
                        OnGpu::load(library, path, *threads, (providers, gpu), partitioned)?;
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

    /// How long the batch in this slot executed, which is [through](Self::run), where that is measured on a GPU.
    pub fn executed(&self, slot: u8) -> Option<Duration> {
        match self {
            Self::Emulated | Self::OnnxRuntime(_) => None,
            Self::OnGpu(engine) => engine.gpu().executed(slot).ok().flatten(),
        }
    }

    /// The warm-up is over: what comes now comes from clients.
    pub fn warmed_up(&mut self) -> Result<(), BootRefusal> {
        match self {
            Self::Emulated | Self::OnnxRuntime(_) => Ok(()),
            Self::OnGpu(engine) => engine.warmed_up(),
        }
    }

    /// Makes a partition ready. Where nothing is bound to SMs, it is at once. `None` if that is said later.
    pub fn prepare(&mut self, groups: Groups) -> Option<Prepared> {
        match self {
            Self::Emulated | Self::OnnxRuntime(_) => Some(Prepared { groups, result: Ok(()) }),
            Self::OnGpu(engine) => engine.prepare(groups),
        }
    }

    /// Lets go of a partition that was made ready.
    pub fn forget(&mut self, groups: Groups) {
        match self {
            Self::Emulated | Self::OnnxRuntime(_) => {}
            // No batch is on its way before the worker serves.
            Self::OnGpu(engine) => engine.forget(groups, false),
        }
    }

    /// Runs a batch, and writes the parts of its answer into `slot`.
    pub fn run(&mut self, inputs: &Inputs<'_>, slot: &mut AnswerSlot<'_>) -> Result<Vec<Output>, RunFailure> {
        let outputs = match self {
            Self::Emulated => echo::run(inputs, slot),
            Self::OnnxRuntime(engine) => engine.run(inputs, slot)?,
            Self::OnGpu(engine) => {
                let outputs = engine.begin(inputs, slot)?;
                engine.gpu().synchronize().map_err(|fault| RunFailure::Engine(chain(&fault)))?;
                return Ok(outputs);
            }
        };
        slot.check().map(|()| outputs)
    }
}
