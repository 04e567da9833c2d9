//! What a loaded model means under its configuration. Pure.

use shadowslice_shared::boot::{BootRefusal, Loaded, WarmUp};
use shadowslice_shared::tensor::TensorSpec;

use crate::process::plan_warm_up;
use shadowslice_config::{Batch, Engine, Model};
use shadowslice_datapath::pipeline::Metadata;

/// What clients and batcher see of a loaded model; or why it cannot be served as configured.
pub(super) fn describe(model: &Model, loaded: &Loaded) -> Result<Metadata, BootRefusal> {
    Ok(Metadata {
        name: model.name.clone(),
        platform: match model.engine {
            Engine::OnnxRuntime { .. } => "onnxruntime_onnx",
            Engine::Python { .. } => "python",
            Engine::Emulated { .. } => "emulated",
        },
        max_batch: batching(&model.batch, loaded)?.0,
        streams: (loaded.streams > 0).then_some(loaded.streams),
        inputs: loaded.inputs.clone(),
        outputs: loaded.outputs.clone(),
    })
}

pub fn warm_up(model: &Model, loaded: &Loaded) -> Result<WarmUp, BootRefusal> {
    let (max, sizes) = batching(&model.batch, loaded)?;
    plan_warm_up(&loaded.inputs, max > 0, sizes, &model.warmup)
}

/// The largest batch, and the sizes to warm up.
fn batching(batch: &Batch, loaded: &Loaded) -> Result<(u32, Vec<u32>), BootRefusal> {
    if let Some(max @ 1..) = batch.max.filter(|_| loaded.streams > 0) {
        let why =
            format!("batch.max is {max}, but the model streams: its requests share no batch; leave it out");
        return Err(BootRefusal::Model(why));
    }
    let fixed = loaded.inputs.iter().chain(&loaded.outputs).find(|tensor| !opens_with_batch(tensor));
    match (batch.max, fixed) {
        (Some(max @ 1..), Some(tensor)) => Err(BootRefusal::Model(format!(
            "batch.max is {max}, but '{}' has shape {:?}, whose first axis is no batch of any size; \
             set `batch: {{max: 0}}` or export the model with a dynamic first axis",
            tensor.name, tensor.shape
        ))),
        _ => Ok(batch.resolve(fixed.is_none() && loaded.streams == 0)),
    }
}

fn opens_with_batch(tensor: &TensorSpec) -> bool {
    tensor.shape.first() == Some(&-1)
}
