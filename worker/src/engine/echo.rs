//! The emulated engine.

use shadowslice_shared::batch::{BatchOutput, RunFailure};
use shadowslice_shared::boot::EchoTensor;
use shadowslice_shared::tensor::TensorSpec;

use super::{Engine, EngineAnswer, Signature};
use crate::answer::AnswerSlot;
use crate::inputs::Inputs;

/// Returns the signature of an emulated model. If `batched` is true, every shape begins with a
/// batch axis.
pub(super) fn signature(tensors: &[EchoTensor], batched: bool) -> Signature {
    let whole = |name: &str, tensor: &EchoTensor| {
        let batch = batched.then_some(-1);
        let shape = batch.into_iter().chain(tensor.input.shape.iter().copied()).collect();
        TensorSpec { name: name.to_owned(), datatype: tensor.input.datatype, shape }
    };
    Signature {
        optional: Vec::new(),
        inputs: tensors.iter().map(|tensor| whole(&tensor.input.name, tensor)).collect(),
        outputs: tensors.iter().map(|tensor| whole(&tensor.output, tensor)).collect(),
        streams: None,
    }
}

/// The emulated engine, which returns every input unchanged as an output.
#[derive(Debug)]
pub struct EmulatedEngine;

impl Engine for EmulatedEngine {
    fn run(&mut self, inputs: &Inputs<'_>, slot: &mut AnswerSlot<'_>) -> Result<EngineAnswer, RunFailure> {
        let output = |input| BatchOutput {
            shape: inputs.row_shape(input).to_vec(),
            parts: (0..inputs.requests()).map(|request| slot.put(inputs.part(request, input))).collect(),
        };
        let outputs = (0..inputs.specs().len()).map(output).collect();
        slot.check().map(|()| EngineAnswer::complete(outputs))
    }
}
