//! Determines which parts of a host a configuration requires.

use shadowslice_config::{
    Config, CudaDevice, EngineConfig, GpuConfig, ModelConfig, MpsClients, ProviderKind,
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
    pub(super) clients: Vec<GpuClients>,
}

/// The processes that a configuration needs on a GPU under MPS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct GpuClients {
    pub(super) device: CudaDevice,
    pub(super) needed: MpsClients,
    /// The models with `gpu: auto`, which may be placed on this GPU or on another one.
    pub(super) unplaced: usize,
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
            clients: Vec::new(),
        }
    }

    pub(super) fn of(config: &Config) -> Self {
        let device = |gpu: &GpuConfig| match gpu {
            GpuConfig::Cuda { device, .. } => Some(device.clone()),
            GpuConfig::Emulated { .. } => None,
        };
        let uses = |provider: ProviderKind| {
            config.models.iter().any(|model| match &model.engine {
                EngineConfig::OnnxRuntime { providers, .. } => providers.contains(&provider),
                EngineConfig::Python { .. } | EngineConfig::Emulated { .. } => false,
            })
        };
        let is_onnx = |model: &ModelConfig| matches!(model.engine, EngineConfig::OnnxRuntime { .. });
        Self {
            gpus: Some(config.gpus.iter().filter_map(device).collect()),
            mps: config.gpus.iter().any(GpuConfig::is_under_mps),
            onnxruntime: config.models.iter().any(is_onnx),
            // The TensorRT provider also uses the CUDA provider.
            cuda: uses(ProviderKind::Cuda) || uses(ProviderKind::TensorRt),
            tensorrt: uses(ProviderKind::TensorRt),
            descriptors: config.own_descriptors() + config.limits.connections as u64,
            clients: clients(config),
        }
    }

    pub(super) fn gpu(&self) -> bool {
        self.gpus.as_ref().is_none_or(|gpus| !gpus.is_empty())
    }
}

fn clients(config: &Config) -> Vec<GpuClients> {
    // On the only GPU, models with `gpu: auto` have their place.
    let is_placed = |model: &ModelConfig| !model.gpu_auto || config.gpus.len() == 1;
    let unplaced = config.models.iter().filter(|model| !is_placed(model)).count();
    let of_gpu = |(index, gpu): (usize, &GpuConfig)| {
        let GpuConfig::Cuda { device, .. } = gpu else { return None };
        let models = config.models.iter().filter(|model| model.gpu == index && is_placed(model));
        let needed = MpsClients::of(models);
        gpu.is_under_mps().then(|| GpuClients { device: device.clone(), needed, unplaced })
    };
    config.gpus.iter().enumerate().filter_map(of_gpu).collect()
}
