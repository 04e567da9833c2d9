//! The parts of a host that a configuration needs.

use shadowslice_config::{Config, CudaDevice, Engine, Gpu, Model, Partitioning, Provider};

/// The file descriptors that are assumed to be needed without a configuration, which would limit
/// the connections.
const USUAL_DESCRIPTORS: u64 = 4096;

/// The needed parts of a host. A missing part is a fault only if it is needed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Requirements {
    /// The needed real GPUs; `None` for all GPUs of the host.
    pub(super) gpus: Option<Vec<CudaDevice>>,
    pub(super) mps: bool,
    pub(super) onnxruntime: bool,
    pub(super) cuda: bool,
    pub(super) tensorrt: bool,
    pub(super) descriptors: u64,
}

impl Requirements {
    /// Returns the parts that are needed to serve ONNX models on shares of real GPUs.
    pub(super) fn everything() -> Self {
        Self {
            gpus: None,
            mps: true,
            onnxruntime: true,
            cuda: true,
            tensorrt: false,
            descriptors: USUAL_DESCRIPTORS,
        }
    }

    pub(super) fn of(config: &Config) -> Self {
        let device = |gpu: &Gpu| match gpu {
            Gpu::Cuda { device, .. } => Some(device.clone()),
            Gpu::Emulated { .. } => None,
        };
        let by_mps = |gpu: &Gpu| matches!(gpu, Gpu::Cuda { partition: Partitioning::Mps, .. });
        let uses = |provider: Provider| {
            config.models.iter().any(|model| match &model.engine {
                Engine::OnnxRuntime { providers, .. } => providers.contains(&provider),
                Engine::Python { .. } | Engine::Emulated { .. } => false,
            })
        };
        let is_onnx = |model: &Model| matches!(model.engine, Engine::OnnxRuntime { .. });
        Self {
            gpus: Some(config.gpus.iter().filter_map(device).collect()),
            mps: config.gpus.iter().any(by_mps),
            onnxruntime: config.models.iter().any(is_onnx),
            // The TensorRT provider uses the CUDA provider.
            cuda: uses(Provider::Cuda) || uses(Provider::TensorRt),
            tensorrt: uses(Provider::TensorRt),
            descriptors: config.own_descriptors() + config.limits.connections as u64,
        }
    }

    pub(super) fn gpu(&self) -> bool {
        self.gpus.as_ref().is_none_or(|gpus| !gpus.is_empty())
    }
}
