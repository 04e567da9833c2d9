//! The checked configuration: every default filled in, nothing left that could be wrong.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use shadowslice_policy::sharing::Choice;
use shadowslice_policy::sharing::PolicyName;
pub use shadowslice_policy::workers::{HandoverMode, Timeouts};
use shadowslice_shared::boot::{EchoTensor, InputValues};
use shadowslice_shared::profile::Profile;
use shadowslice_shared::units::{Percent, Sms};

use super::arrays::ArrayFile;
use super::faults::ConfigFault;
use super::peers::{AllowedClients, Peers};

/// Beside connections, but with those beyond the bound.
const DESCRIPTORS_OF_ALL: u64 = 150;
const DESCRIPTORS_OF_A_MODEL: u64 = 10;

#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Absolute.
    pub run_dir: PathBuf,
    pub listen: ListenConfig,
    /// Never empty.
    pub gpus: Vec<GpuConfig>,
    /// Never empty; names differ.
    pub models: Vec<ModelConfig>,
    /// Who may give orders besides root and the supervisor's user; `None` if nobody.
    pub control: Option<Peers>,
    pub model_control: AllowedClients,
    pub controller: ControllerConfig,
    pub limits: LimitsConfig,
    pub timeouts: Timeouts,
    /// How long a host that is to stop serves on, unready.
    pub lame_duck: Duration,
    /// Nothing is served when a model cannot be started; else the other models are.
    pub strict_start: bool,
    pub ready: ReadyConfig,
    pub onnxruntime: OnnxRuntimeConfig,
    pub workers: WorkersConfig,
    /// `None` if no request is traced.
    pub tracing: Option<TracingConfig>,
    /// The file of the access log, absolute; `None` if answers are not logged.
    pub access_log: Option<PathBuf>,
    /// Faults of the models' own files. `check` refuses them; `serve` starts the other models.
    pub file_faults: Vec<ConfigFault>,
    /// Names that this host does not have: of users, groups and cores.
    pub host_faults: Vec<ConfigFault>,
    /// Settings that have no effect in this configuration, or cannot be right.
    pub notes: Vec<ConfigFault>,
}

impl Config {
    pub fn own_descriptors(&self) -> u64 {
        DESCRIPTORS_OF_ALL + DESCRIPTORS_OF_A_MODEL * self.models.len() as u64
    }
}

/// Which models must be ready for the host to be ready.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum ReadyConfig {
    All,
    /// One of them, once all models of the start have been ready or given up.
    #[default]
    Any,
    /// Each of these; they are names of models.
    Each(Vec<String>),
}

/// No two sockets are the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListenConfig {
    pub http: Vec<Listener>,
    pub grpc: Vec<Listener>,
    pub metrics: Vec<Listener>,
}

/// Where no mode is configured: the socket's owner and its group may connect.
pub const SOCKET_MODE: u32 = 0o660;

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Listener {
    Unix {
        /// Absolute, and fits into a socket's address.
        path: PathBuf,
        /// `None` for [`SOCKET_MODE`].
        mode: Option<u32>,
        group: Option<String>,
        /// Who may connect; `None` if everybody whom the mode lets in.
        peers: Option<Peers>,
    },
    Tcp {
        address: SocketAddr,
        /// `None` if connections are not encrypted.
        tls: Option<Tls>,
        /// A file with the tokens of those who may ask; `None` if everybody may.
        tokens: Option<PathBuf>,
    },
}

/// Files in PEM format, by their absolute paths.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tls {
    /// The server's own, and what leads from it to its clients' root.
    pub certificate: PathBuf,
    pub key: PathBuf,
    /// Who signs the certificates that clients must have; `None` if they need none.
    pub client_ca: Option<PathBuf>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GpuConfig {
    /// A pool of SMs that takes as long as the profiles say.
    Emulated {
        sms: Sms,
    },
    Cuda {
        device: CudaDevice,
        partition: Partitioning,
    },
}

/// What enforces shares on a real GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Partitioning {
    Mps,
    None,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CudaDevice {
    Index(u32),
    /// `GPU-...`.
    Uuid(String),
}

impl fmt::Display for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Index(index) => index.fmt(f),
            Self::Uuid(uuid) => f.write_str(uuid),
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    pub name: String,
    pub engine: EngineConfig,
    /// The index in [`Config::gpus`].
    pub gpu: usize,
    /// Whether the supervisor chooses the GPU; `gpu` is 0 until it has.
    pub gpu_auto: bool,
    /// `None` if no profile was given, or the given profile is broken.
    pub profile: Option<Profile>,
    /// Absolute.
    pub profile_path: Option<PathBuf>,
    pub share: ShareConfig,
    pub slo: SloTarget,
    pub batch: BatchConfig,
    pub queue: QueueConfig,
    /// 1 is the highest.
    pub priority: u32,
    pub handover: HandoverMode,
    /// A second worker is kept warm at the share in force, to serve if the other one dies.
    pub standby: bool,
    /// The cores that workers are pinned to; empty where they are not.
    pub cpus: Vec<usize>,
    /// Of a worker, in bytes; real GPUs only.
    pub memory_limit: Option<u64>,
    pub warmup: WarmupConfig,
    /// A fault of the model's own files. Such a model stays unready.
    pub broken: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EngineConfig {
    OnnxRuntime {
        /// Absolute.
        path: PathBuf,
        /// Within one operator, on the CPU.
        threads: u32,
        /// The preferred provider first; empty on an emulated GPU.
        providers: Vec<ProviderKind>,
    },
    /// A class in a Python file.
    Python {
        /// Absolute; a file, or a folder with `model.py`.
        path: PathBuf,
        /// The program that runs it, absolute.
        interpreter: PathBuf,
        /// Of its libraries, within one operator.
        threads: u32,
    },
    /// Takes the time that the profile says.
    Emulated { tensors: Vec<EchoTensor> },
}

impl EngineConfig {
    pub fn has_tensorrt(&self) -> bool {
        matches!(self, Self::OnnxRuntime { providers, .. } if providers.contains(&ProviderKind::TensorRt))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProviderKind {
    Cuda,
    TensorRt,
}

/// `min <= initial <= max`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShareConfig {
    pub initial: Percent,
    /// The configuration says so, so that no policy starts the model with something else.
    pub given: bool,
    pub min: Percent,
    pub max: Percent,
}

/// `percentile` percent of the requests are answered within `latency`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SloTarget {
    /// Above zero.
    pub latency: Duration,
    /// The percentile; above 0 and below 100.
    pub percentile: f64,
}

/// The inputs of a model's warm-up, as far as the operator gives them.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct WarmupConfig {
    /// The file with all inputs, if there is one; an absolute path.
    pub file: Option<PathBuf>,
    pub inputs: BTreeMap<String, WarmupInput>,
}

impl WarmupConfig {
    /// Returns the files that values come from.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        let of_inputs = self.inputs.values().filter_map(|input| match &input.values {
            Some(WarmupValues::File(file)) if self.file.is_none() => Some(file.path.as_path()),
            _ => None,
        });
        self.file.as_deref().into_iter().chain(of_inputs)
    }
}

/// The shape and the values that an input is warmed up with.
#[derive(Debug, Clone, PartialEq)]
pub struct WarmupInput {
    /// Without the batch axis; `None` for the model's, with free axes of a length that works.
    pub shape: Option<Vec<i64>>,
    /// `None` for values that are made up.
    pub values: Option<WarmupValues>,
}

impl WarmupInput {
    /// Returns the shape that is written, or that of the array in a file, with its batch axis.
    pub(super) fn given_shape(&self) -> Option<&[i64]> {
        match (&self.shape, &self.values) {
            (Some(shape), _) => Some(shape),
            (None, Some(WarmupValues::File(file))) => file.array.as_ref().map(|array| array.shape()),
            (None, _) => None,
        }
    }
}

/// Where the values of an input in the warm-up come from.
#[derive(Debug, Clone, PartialEq)]
pub enum WarmupValues {
    Written(InputValues),
    /// Its array also gives the shape.
    File(ArrayFile),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchConfig {
    /// 0 for a model without a batch axis. `None` until the model says whether it has one: see
    /// [`BatchConfig::resolve`].
    pub max: Option<u32>,
    /// Ascending to `max`; `None` for powers of two.
    pub sizes: Option<Vec<u32>>,
    /// How long a batch may wait to grow although it could run.
    pub max_delay: Duration,
}

impl BatchConfig {
    /// Where the configuration leaves it to the model, and the model has a batch axis.
    pub const DEFAULT_MAX: u32 = 32;

    /// The largest batch (0: no batch axis) and the sizes to warm up.
    pub fn resolve(&self, has_batch_axis: bool) -> (u32, Vec<u32>) {
        let max = self.max.unwrap_or(if has_batch_axis { Self::DEFAULT_MAX } else { 0 });
        (max, self.sizes.clone().unwrap_or_else(|| batch_sizes(max)))
    }
}

/// Powers of two up to `max`, and `max` itself; only 1 for a model without a batch axis.
pub fn batch_sizes(max: u32) -> Vec<u32> {
    let powers = std::iter::successors(Some(1_u32), |size| size.checked_mul(2));
    powers.take_while(|&size| size < max).chain([max.max(1)]).collect()
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueConfig {
    /// Requests that wait or run; more are refused.
    pub max_requests: usize,
    /// Bytes of the model's request slab; at least one request fits.
    pub memory: u64,
    pub on_late: OnLate,
}

/// For a request that does not run in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnLate {
    Reject,
    Serve,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ControllerConfig {
    /// Under `static` nothing is decided: shares stay until an operator resizes them.
    pub policy: Choice,
    pub interval: Duration,
    /// Decisions are carried out, and not only reported.
    pub act: bool,
    /// Of all standing workers of a GPU, in bytes. `None`: half of the memory of a real GPU, and no
    /// bound on an emulated GPU.
    pub standby_memory: Option<u64>,
}

impl ControllerConfig {
    /// `None` if the policy decides no shares.
    pub fn decides(&self) -> Option<Choice> {
        (self.policy != Choice::of(PolicyName::Static)).then_some(self.policy)
    }

    /// `None` if the policy decides no shares, or its decisions are only reported.
    pub fn acts(&self) -> Option<Choice> {
        self.decides().filter(|_| self.act)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LimitsConfig {
    pub request_bytes: u64,
    /// For one batch's answer.
    pub response_bytes: u64,
    /// Of all requests and answers on their way, in bytes. `None`: a quarter of the host's memory.
    pub memory: Option<u64>,
    /// In all models together.
    pub in_flight: usize,
    pub connections: usize,
    /// The time that an HTTP connection stays open without a request.
    pub keep_alive: Duration,
    /// Which clients may have tensors in shared memory read and written.
    pub shared_memory: AllowedClients,
}

impl LimitsConfig {
    pub const KEEP_ALIVE: Duration = Duration::from_secs(75);

    /// The largest request and its answer must find room beside another one.
    pub fn least_memory(request_bytes: u64, response_bytes: u64) -> u64 {
        (4 * request_bytes.max(response_bytes)).max(4 << 20)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkersConfig {
    /// Names of the supervisor's variables that workers have besides those that all have.
    pub environment: Vec<String>,
    /// Numbers of the users as which the models' workers run, one each; the supervisor's if `None`.
    pub users: Option<RangeInclusive<u32>>,
    /// In bytes, of the host's memory, for each worker; `None` for no limit.
    pub memory: Option<u64>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OnnxRuntimeConfig {
    /// An absolute path. `None`: the library in its usual place.
    pub library: Option<PathBuf>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TracingConfig {
    /// Speaks OTLP over gRPC: `http://HOST:PORT`.
    pub otlp: String,
    /// The part of the requests that belong to no trace yet that begins a trace.
    pub sample: SampleRate,
    pub service: String,
}

/// In parts of a million.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleRate(u32);

impl SampleRate {
    pub const ALL: u32 = 1_000_000;

    /// One request in a hundred.
    pub const DEFAULT: Self = Self(Self::ALL / 100);

    /// `None` if `parts` is more than [`SampleRate::ALL`].
    pub fn new(parts: u32) -> Option<Self> {
        (parts <= Self::ALL).then_some(Self(parts))
    }

    pub fn parts(self) -> u32 {
        self.0
    }
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
    fn the_model_decides_what_the_configuration_leaves_open() {
        let batch = |max, sizes| BatchConfig { max, sizes, max_delay: Duration::ZERO };
        assert_eq!(batch(None, None).resolve(true), (32, vec![1, 2, 4, 8, 16, 32]));
        assert_eq!(batch(None, None).resolve(false), (0, vec![1]));
        assert_eq!(batch(Some(4), Some(vec![3, 4])).resolve(true), (4, vec![3, 4]));
    }
}
