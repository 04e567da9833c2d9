//! Determines which parts of a host a configuration requires.

use shadowslice_config::{
    Config, CudaDevice, EngineConfig, GpuConfig, ModelConfig, Partitioning, ProviderKind,
};

/// The number of file descriptors that is required without a configuration. With a configuration,
/// the number depends on the limit on connections.
const USUAL_DESCRIPTORS: u64 = 4096;

/// The required parts of a host. A missing part is a fault only if it is required.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Requirements {
    /// The required real GPUs, or `None` for all GPUs of the host.
    pub(super) gpus: Option<Vec<CudaDevice>>,
    pub(super) mps: bool,
    pub(super) onnxruntime: bool,
    pub(super) cuda: bool,
    pub(super) tensorrt: bool,
    pub(super) descriptors: u64,
}

impl Requirements {
    /// Returns the requirements for serving ONNX models on shares of real GPUs.
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
        let device = |gpu: &GpuConfig| match gpu {
            GpuConfig::Cuda { device, .. } => Some(device.clone()),
            GpuConfig::Emulated { .. } => None,
        };
        let by_mps = |gpu: &GpuConfig| matches!(gpu, GpuConfig::Cuda { partition: Partitioning::Mps, .. });
        let uses = |provider: ProviderKind| {
            config.models.iter().any(|model| match &model.engine {
                EngineConfig::OnnxRuntime { providers, .. } => providers.contains(&provider),
                EngineConfig::Python { .. } | EngineConfig::Emulated { .. } => false,
            })
        };
        let is_onnx = |model: &ModelConfig| matches!(model.engine, EngineConfig::OnnxRuntime { .. });
        Self {
            gpus: Some(config.gpus.iter().filter_map(device).collect()),
            mps: config.gpus.iter().any(by_mps),
            onnxruntime: config.models.iter().any(is_onnx),
            // The TensorRT provider also uses the CUDA provider.
            cuda: uses(ProviderKind::Cuda) || uses(ProviderKind::TensorRt),
            tensorrt: uses(ProviderKind::TensorRt),
            descriptors: config.own_descriptors() + config.limits.connections as u64,
        }
    }

    pub(super) fn gpu(&self) -> bool {
        self.gpus.as_ref().is_none_or(|gpus| !gpus.is_empty())
    }
}
