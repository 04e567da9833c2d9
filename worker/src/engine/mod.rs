//! What runs a model: takes a checked batch, writes the answer into its slot.

mod echo;
mod onnxruntime;

use shadowslice_shared::batch::{Output, RunFailure};
use shadowslice_shared::boot::{EngineSpec, Refusal};
use shadowslice_shared::tensor::TensorSpec;

use crate::answer::AnswerSlot;
use crate::inputs::Inputs;
use onnxruntime::OnnxRuntime;

/// An engine with its model.
#[derive(Debug)]
pub enum Engine {
    /// Answers with its input.
    Emulated,
    /// ONNX Runtime.
    OnnxRuntime(Box<OnnxRuntime>),
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
    /// Loads a model.
    pub fn load(spec: &EngineSpec) -> Result<(Self, Signature), Refusal> {
        match spec {
            EngineSpec::Emulated { tensors, batched } => {
                Ok((Self::Emulated, echo::signature(tensors, *batched)))
            }
            EngineSpec::OnnxRuntime { library, path, threads, providers: _ } => {
                let (engine, signature) = OnnxRuntime::load(library, path, *threads)?;
                Ok((Self::OnnxRuntime(Box::new(engine)), signature))
            }
        }
    }

    /// Runs a batch, and writes the parts of its answer into `slot`.
    pub fn run(&mut self, inputs: &Inputs<'_>, slot: &mut AnswerSlot<'_>) -> Result<Vec<Output>, RunFailure> {
        let outputs = match self {
            Self::Emulated => echo::run(inputs, slot),
            Self::OnnxRuntime(engine) => engine.run(inputs, slot)?,
        };
        slot.check().map(|()| outputs)
    }
}
