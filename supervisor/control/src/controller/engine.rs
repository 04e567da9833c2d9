//! What a worker is told about the engine that runs its model.

use std::path::Path;

use shadowslice_shared::boot::{EngineSpec, ProviderSpec, WorkerPurpose};
use shadowslice_shared::units::Percent;

use crate::backend::GpuBackend;
use shadowslice_config as config;

use shadowslice_config::{EngineConfig, ModelConfig};

/// `library` is ONNX Runtime's; `engines` is the folder for what is built for a share.
pub fn spec(model: &ModelConfig, library: &Path, engines: &Path, share: Percent) -> EngineSpec {
    match &model.engine {
        EngineConfig::OnnxRuntime { path, threads, providers } => EngineSpec::OnnxRuntime {
            library: library.to_owned(),
            path: path.clone(),
            threads: *threads,
            providers: providers.iter().map(|provider| offered(*provider, model, engines, share)).collect(),
            optimised: Some(engines.join(&model.name).join("optimised")),
        },
        EngineConfig::Python { path, interpreter, threads } => EngineSpec::Python {
            interpreter: interpreter.clone(),
            path: path.clone(),
            threads: *threads,
            cache: Some(engines.join(&model.name).join("cache")),
        },
        EngineConfig::Emulated { tensors } => {
            EngineSpec::Emulated { tensors: tensors.clone(), batched: model.batch.max != Some(0) }
        }
    }
}

/// Which worker computes the reference answers first. A Python model may know no CPU.
pub fn reference(model: &ModelConfig, gpu: &dyn GpuBackend) -> WorkerPurpose {
    let real = gpu.status().uuid.is_some();
    match model.engine {
        EngineConfig::Python { .. } if real => WorkerPurpose::DeviceReference,
        _ => WorkerPurpose::Reference,
    }
}

/// TensorRT chooses its kernels for the SMs it sees, so its engines are kept for each share.
fn offered(
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
