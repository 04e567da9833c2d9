//! The settings of a model.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

pub use shadowslice_policy::workers::HandoverMode;
use shadowslice_shared::boot::{EchoTensor, InputValues};
use shadowslice_shared::profile::Profile;
use shadowslice_shared::units::Percent;

use super::openai::OpenAiConfig;
use super::rollout::{ModelVersion, RolloutConfig};
use crate::arrays::ArrayFile;

/// The configuration of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// The name of the instance, which is unique. It is the name of the model, or `MODEL:NUMBER` for a
    /// model with versions.
    pub name: String,
    /// The model and the version that the instance serves.
    pub version: ModelVersion,
    /// The way in which a new version replaces the released one. `None` if it takes over as soon as it is
    /// ready.
    pub rollout: Option<RolloutConfig>,
    /// The engine that runs the model.
    pub engine: EngineConfig,
    /// The index of the GPU in [`Config::gpus`](super::Config::gpus).
    pub gpu: usize,
    /// True if the supervisor chooses the GPU. `gpu` is 0 until the supervisor has chosen a GPU.
    pub gpu_auto: bool,
    /// The profile, or `None` if the configuration has no profile or the profile has a fault.
    pub profile: Option<Profile>,
    /// The absolute path of the profile.
    pub profile_path: Option<PathBuf>,
    /// The bounds and the initial value of the model's share.
    pub share: ShareConfig,
    /// The latency objective (SLO) of the model's requests.
    pub slo: SloTarget,
    /// The settings of batching.
    pub batch: BatchConfig,
    /// The settings of the request queue.
    pub queue: QueueConfig,
    /// The maximum size of the cache of answers in bytes, or `None` for no cache.
    pub cache: Option<u64>,
    /// The tensors for OpenAI's endpoints, or `None` if the model serves none of them.
    pub openai: Option<Arc<OpenAiConfig>>,
    /// The priority. 1 is the highest priority.
    pub priority: u32,
    /// The mechanism that changes the model's share.
    pub handover: HandoverMode,
    /// The name of the process that the model's workers share with other models. If `None`, each worker
    /// has a process of its own.
    pub shared_worker: Option<String>,
    /// The time at which the model releases its weights on the GPU.
    pub sleep: SleepConfig,
    /// True if the supervisor keeps a second worker warm at the current share. This worker takes
    /// over if the first worker exits unexpectedly.
    pub standby: bool,
    /// The CPU cores to which workers are pinned. An empty list means all cores.
    pub cpus: Vec<usize>,
    /// The limit on a worker's GPU memory, in bytes. The limit only applies to real GPUs.
    pub memory_limit: Option<u64>,
    /// The inputs for the warm-up.
    pub warmup: WarmupConfig,
    /// The first fault of the model's own files, or `None`. A model with such a fault stays
    /// unready.
    pub broken: Option<String>,
}

/// The engine that runs a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EngineConfig {
    /// ONNX Runtime.
    OnnxRuntime {
        /// The absolute path of the model's file.
        path: PathBuf,
        /// The number of CPU threads within one operator.
        threads: u32,
        /// The execution providers, in order of preference. The list is empty on an emulated GPU.
        providers: Vec<ProviderKind>,
    },
    /// A class in a Python file.
    Python {
        /// The absolute path of the file, or of a folder with `model.py`.
        path: PathBuf,
        /// The absolute path of the Python interpreter.
        interpreter: PathBuf,
        /// The number of threads that the model's libraries use within one operator.
        threads: u32,
        /// The time after which a worker interrupts a step of streams.
        step_timeout: Duration,
    },
    /// An engine that waits for the time in the profile, and then returns its inputs as outputs.
    Emulated {
        /// The inputs, and the outputs that repeat the inputs.
        tensors: Vec<EchoTensor>,
    },
}

impl EngineConfig {
    /// Returns whether TensorRT is one of the model's execution providers.
    pub fn has_tensorrt(&self) -> bool {
        matches!(self, Self::OnnxRuntime { providers, .. } if providers.contains(&ProviderKind::TensorRt))
    }

    /// Returns the path of the model's file or folder. The emulated engine has none.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::OnnxRuntime { path, .. } | Self::Python { path, .. } => Some(path),
            Self::Emulated { .. } => None,
        }
    }

    /// Returns the time after which a worker interrupts a step of streams, if the engine has streams.
    pub fn step_timeout(&self) -> Option<Duration> {
        match self {
            Self::Python { step_timeout, .. } => Some(*step_timeout),
            Self::OnnxRuntime { .. } | Self::Emulated { .. } => None,
        }
    }
}

/// An execution provider of ONNX Runtime.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProviderKind {
    /// ONNX Runtime's CUDA provider.
    Cuda,
    /// ONNX Runtime's TensorRT provider.
    TensorRt,
}

/// A model's share of its GPU: `min <= initial <= max`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShareConfig {
    /// The share when the model starts.
    pub initial: Percent,
    /// True if the configuration gives `initial`. In that case no policy starts the model with
    /// another share.
    pub given: bool,
    /// The smallest share that the model can get.
    pub min: Percent,
    /// The largest share that the model can get.
    pub max: Percent,
}

/// The latency objective of a model: `percentile` percent of the requests must be answered within
/// `latency`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SloTarget {
    /// The time within which a request must be answered. It is above zero.
    pub latency: Duration,
    /// The time within which each further answer of a stream must follow, or `None` for no limit.
    pub next: Option<Duration>,
    /// The percentage of requests that must be in time, above 0 and below 100.
    pub percentile: f64,
}

/// The rule that decides when a model sleeps, which means that its weights are not on the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SleepConfig {
    /// The model sleeps only if an operator orders it.
    Never,
    /// The model sleeps when other models need its memory.
    OnPressure,
    /// The model also sleeps when no request has arrived for this time.
    After(Duration),
}

impl SleepConfig {
    /// Returns whether the supervisor may choose the model to sleep.
    pub fn may_sleep(self) -> bool {
        self != Self::Never
    }

    /// Returns the time without requests after which the model sleeps. `None` means no limit.
    pub fn after(self) -> Option<Duration> {
        match self {
            Self::Never | Self::OnPressure => None,
            Self::After(after) => Some(after),
        }
    }
}

/// The inputs that the operator gives for a model's warm-up.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct WarmupConfig {
    /// The absolute path of a file with all inputs, or `None`.
    pub file: Option<PathBuf>,
    /// The inputs that the configuration gives, by name.
    pub inputs: BTreeMap<String, WarmupInput>,
}

impl WarmupConfig {
    /// Returns the files from which the warm-up reads values of inputs.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        let of_inputs = self.inputs.values().filter_map(|input| match &input.values {
            Some(WarmupValues::File(file)) if self.file.is_none() => Some(file.path.as_path()),
            _ => None,
        });
        self.file.as_deref().into_iter().chain(of_inputs)
    }
}

/// The shape and values of an input in the warm-up.
#[derive(Debug, Clone, PartialEq)]
pub struct WarmupInput {
    /// The shape without the batch axis. If `None`, the worker uses the shape that the model
    /// declares. For each free axis, the worker uses the first length that works.
    pub shape: Option<Vec<i64>>,
    /// The values, or `None` if the worker generates values.
    pub values: Option<WarmupValues>,
}

impl WarmupInput {
    /// Returns the shape that the configuration gives, or the shape of the array in a file. The
    /// array's shape includes the batch axis.
    pub(crate) fn given_shape(&self) -> Option<&[i64]> {
        match (&self.shape, &self.values) {
            (Some(shape), _) => Some(shape),
            (None, Some(WarmupValues::File(file))) => file.array.as_ref().map(|array| array.shape()),
            (None, _) => None,
        }
    }
}

/// The values of an input in the warm-up.
#[derive(Debug, Clone, PartialEq)]
pub enum WarmupValues {
    /// Values that are written in the configuration.
    Written(InputValues),
    /// An array in a file, which also gives the shape.
    File(ArrayFile),
}

/// The settings of batching.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchConfig {
    /// The largest batch in rows, or 0 for a model without a batch axis. If `None`,
    /// [`BatchConfig::resolve`] chooses a value when it is known whether the model has a batch
    /// axis.
    pub max: Option<u32>,
    /// The batch sizes to warm up, in ascending order up to `max`. `None` means the sizes that
    /// [`batch_sizes`] returns.
    pub sizes: Option<Vec<u32>>,
    /// The maximum time for which a batch that could run waits for more requests.
    pub max_delay: Duration,
}

impl BatchConfig {
    /// The default of `max` for a model with a batch axis, in rows.
    pub const DEFAULT_MAX: u32 = 32;

    /// Returns the largest batch in rows (0 without a batch axis), and the batch sizes to warm up.
    pub fn resolve(&self, has_batch_axis: bool) -> (u32, Vec<u32>) {
        let max = self.max.unwrap_or(if has_batch_axis { Self::DEFAULT_MAX } else { 0 });
        (max, self.sizes.clone().unwrap_or_else(|| batch_sizes(max)))
    }
}

/// Returns the powers of two below `max`, and `max` itself. If the model has no batch axis (`max`
/// is 0), the only size is 1.
pub fn batch_sizes(max: u32) -> Vec<u32> {
    let powers = std::iter::successors(Some(1_u32), |size| size.checked_mul(2));
    powers.take_while(|&size| size < max).chain([max.max(1)]).collect()
}

/// The settings of a model's request queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueConfig {
    /// The largest number of the model's requests that wait or run at the same time. The supervisor
    /// rejects further requests.
    pub max_requests: usize,
    /// The size of the model's request slab in bytes. The slab is the shared memory for the inputs
    /// of requests. It holds at least one request of the largest size.
    pub memory: u64,
    /// The treatment of late requests.
    pub on_late: OnLate,
}

/// The treatment of a request that cannot meet its deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnLate {
    /// The supervisor rejects the request.
    Reject,
    /// A worker runs the request although the deadline will be missed.
    Serve,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batch_sizes_are_powers_of_two_and_the_maximum() {
        assert_eq!(batch_sizes(0), [1], "no batch axis");
        assert_eq!(batch_sizes(1), [1]);
        assert_eq!(batch_sizes(6), [1, 2, 4, 6]);
        assert_eq!(batch_sizes(8), [1, 2, 4, 8]);
        assert_eq!(batch_sizes(u32::MAX).len(), 33);
    }

    #[test]
    fn the_batch_axis_decides_what_the_configuration_leaves_open() {
        let batch = |max, sizes| BatchConfig { max, sizes, max_delay: Duration::ZERO };
        assert_eq!(batch(None, None).resolve(true), (32, vec![1, 2, 4, 8, 16, 32]));
        assert_eq!(batch(None, None).resolve(false), (0, vec![1]));
        assert_eq!(batch(Some(4), Some(vec![3, 4])).resolve(true), (4, vec![3, 4]));
    }
}
