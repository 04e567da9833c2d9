//! The description of the engine that a worker needs to run its model.

use std::path::Path;

use shadowslice_shared::boot::{EngineSpec, ProviderSpec, WorkerPurpose};
use shadowslice_shared::model_cache::OPTIMISED;
use shadowslice_shared::units::Percent;

use crate::backend::GpuBackend;
use shadowslice_config as config;

use shadowslice_config::{EngineConfig, ModelConfig};

/// Returns the description of a model's engine. `library` is the library of ONNX Runtime. `engines` is the
/// folder for engines and optimised models.
pub fn spec(model: &ModelConfig, library: &Path, engines: &Path, share: Percent) -> EngineSpec {
    match &model.engine {
        EngineConfig::OnnxRuntime { path, threads, providers } => EngineSpec::OnnxRuntime {
            library: library.to_owned(),
            path: path.clone(),
            threads: *threads,
            providers: providers
                .iter()
                .map(|provider| provider_spec(*provider, model, engines, share))
                .collect(),
            optimised: Some(engines.join(&model.name).join(OPTIMISED)),
        },
        EngineConfig::Python { path, interpreter, threads, step_timeout } => EngineSpec::Python {
            interpreter: interpreter.clone(),
            path: path.clone(),
            threads: *threads,
            cache: Some(engines.join(&model.name).join("cache")),
            step_timeout: *step_timeout,
        },
        EngineConfig::Emulated { tensors } => {
            EngineSpec::Emulated { tensors: tensors.clone(), batched: model.batch.max != Some(0) }
        }
    }
}

/// Returns the purpose of the worker that first tries to compute the reference answers. On a real GPU, a
/// Python model computes them on the GPU, because the model may not support the CPU.
pub fn reference(model: &ModelConfig, gpu: &dyn GpuBackend) -> WorkerPurpose {
    let real = gpu.is_real();
    match model.engine {
        EngineConfig::Python { .. } if real => WorkerPurpose::DeviceReference,
        _ => WorkerPurpose::Reference,
    }
}

/// Returns the description of an execution provider. Each share has its own cache of TensorRT engines,
/// because TensorRT chooses kernels for the SMs that it finds.
fn provider_spec(
    provider: config::ProviderKind,
    model: &ModelConfig,
    engines: &Path,
    share: Percent,
) -> ProviderSpec {
    match provider {
        config::ProviderKind::Cuda => ProviderSpec::Cuda,
        config::ProviderKind::TensorRt => {
            let cache = engines.join(&model.name).join(format!("{}percent", share.get()));
            ProviderSpec::TensorRt { cache }
        }
    }
}
