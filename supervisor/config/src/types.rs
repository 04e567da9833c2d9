//! The types of the checked configuration. All defaults are filled in and all values are valid.

mod model;
mod openai;
mod rollout;

use std::fmt;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

pub use shadowslice_policy::sharing::Choice;
use shadowslice_policy::sharing::PolicyName;
pub use shadowslice_policy::workers::Timeouts;
use shadowslice_shared::units::Sms;

pub use model::*;
pub use openai::*;
pub use rollout::*;

use super::faults::ConfigFault;
use super::peers::{AllowedClients, Peers};
use super::render::Document;
use super::tenants::TenantsConfig;

/// The number of file descriptors that a supervisor without models needs, in addition to one for
/// each connection.
const DESCRIPTORS_OF_ALL: u64 = 150;
/// The number of file descriptors that the supervisor needs for each model.
const DESCRIPTORS_OF_A_MODEL: u64 = 10;

/// The whole configuration of a supervisor.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The absolute path of the run directory.
    pub run_dir: PathBuf,
    /// The addresses of the supervisor's servers.
    pub listen: ListenConfig,
    /// The GPUs. There is at least one GPU.
    pub gpus: Vec<GpuConfig>,
    /// The models. There is at least one model, and all names differ.
    pub models: Vec<ModelConfig>,
    /// The users and groups with the permission to send commands to the control socket. Root and
    /// the supervisor's user always have this permission. `None` if no other user has it.
    pub control: Option<Peers>,
    /// The clients with the permission to load and unload models.
    pub model_control: AllowedClients,
    /// The tenants, which divide the SM time.
    pub tenants: TenantsConfig,
    /// The settings of the sharing policy.
    pub controller: ControllerConfig,
    /// The limits on requests and connections.
    pub limits: LimitsConfig,
    /// The time limits of workers.
    pub timeouts: Timeouts,
    /// The time for which a stopping host reports that it is unready but still serves requests.
    pub lame_duck: Duration,
    /// True if the supervisor exits when a model cannot start. If false, the supervisor serves the
    /// other models.
    pub strict_start: bool,
    /// The models that must be ready for the host to be ready.
    pub ready: ReadyConfig,
    /// The settings of ONNX Runtime.
    pub onnxruntime: OnnxRuntimeConfig,
    /// The settings of worker processes.
    pub workers: WorkersConfig,
    /// The settings of tracing, or `None` to trace no requests.
    pub tracing: Option<TracingConfig>,
    /// The absolute path of the access log, or `None` for no access log.
    pub access_log: Option<PathBuf>,
    /// The faults of the models' own files. `check` reports them as errors, and `serve` starts the
    /// other models.
    pub file_faults: Vec<ConfigFault>,
    /// The users, groups, cores and files that the configuration names but this host does not have.
    pub host_faults: Vec<ConfigFault>,
    /// Notes on settings that have no effect in this configuration or are probably wrong.
    pub notes: Vec<ConfigFault>,
    /// The document from which the configuration was read.
    pub document: Document,
}

impl Config {
    /// Returns the number of file descriptors that the supervisor needs, not counting those of
    /// connections.
    pub fn own_descriptors(&self) -> u64 {
        DESCRIPTORS_OF_ALL + DESCRIPTORS_OF_A_MODEL * self.models.len() as u64
    }
}

/// The models that must be ready for the host to be ready.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum ReadyConfig {
    /// All models must be ready.
    All,
    /// One or more models must be ready. After a start, the host also waits until no model counts
    /// as loading. A model counts as loading until it is ready, until its start has failed
    /// permanently, or until one of its workers was killed.
    #[default]
    Any,
    /// All models with these names must be ready.
    Each(Vec<String>),
}

/// The addresses of the supervisor's servers. No two addresses are equal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListenConfig {
    /// The addresses for inference over HTTP.
    pub http: Vec<Listener>,
    /// The addresses for inference over gRPC.
    pub grpc: Vec<Listener>,
    /// The addresses for metrics.
    pub metrics: Vec<Listener>,
}

/// The default file mode of a Unix socket. Only the owner and the group can connect.
pub const SOCKET_MODE: u32 = 0o660;

/// An address on which the supervisor listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Listener {
    /// A Unix socket.
    Unix {
        /// The absolute path. It is short enough for a socket address.
        path: PathBuf,
        /// The file mode, or `None` for [`SOCKET_MODE`].
        mode: Option<u32>,
        /// The group that owns the socket's file.
        group: Option<String>,
        /// The users and groups with the permission to connect. `None` if only the file mode
        /// restricts connections.
        peers: Option<Peers>,
    },
    /// A TCP port.
    Tcp {
        /// The IP address and the port.
        address: SocketAddr,
        /// The TLS settings, or `None` for connections without encryption.
        tls: Option<Tls>,
        /// The file with the clients' tokens, or `None` if clients need no token.
        tokens: Option<PathBuf>,
    },
}

/// The absolute paths of TLS files in PEM format.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tls {
    /// The server's certificate, followed by its chain up to a root that the clients trust.
    pub certificate: PathBuf,
    /// The private key of the server's certificate.
    pub key: PathBuf,
    /// The certificate of the CA that signs clients' certificates, or `None` if clients need no
    /// certificate.
    pub client_ca: Option<PathBuf>,
}

/// A GPU on which models run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GpuConfig {
    /// An emulated GPU. Batches on this GPU take the times in the models' profiles.
    Emulated {
        /// The number of SMs.
        sms: Sms,
        /// The maximum memory of all workers, in bytes. `None` means no limit.
        memory: Option<u64>,
    },
    /// A real GPU.
    Cuda {
        /// The index or UUID of the GPU.
        device: CudaDevice,
        /// The mechanism that enforces shares.
        partition: Partitioning,
        /// The maximum memory of all workers, in bytes. `None` means all memory that is free.
        memory: Option<u64>,
    },
}

impl GpuConfig {
    /// Returns the maximum memory of all workers, in bytes. `None` means that the configuration does not
    /// limit it.
    pub fn memory(&self) -> Option<u64> {
        match self {
            Self::Emulated { memory, .. } | Self::Cuda { memory, .. } => *memory,
        }
    }

    /// Returns true if the workers on the GPU are clients of an MPS server.
    pub fn is_under_mps(&self) -> bool {
        matches!(self, Self::Cuda { partition: Partitioning::Mps, .. })
    }
}

/// The mechanism that enforces shares on a real GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Partitioning {
    /// NVIDIA MPS.
    Mps,
    /// No enforcement: each worker may use the whole GPU.
    None,
}

/// The index or UUID of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CudaDevice {
    /// The index that NVML gives the GPU.
    Index(u32),
    /// The UUID, such as `GPU-5a7c...`.
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

/// The settings of the sharing policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ControllerConfig {
    /// The policy. Under `static`, shares stay the same until an operator resizes a model.
    pub policy: Choice,
    /// The time between two decisions of the policy.
    pub interval: Duration,
    /// True if the supervisor applies the policy's decisions. If false, the supervisor only reports
    /// the decisions.
    pub act: bool,
    /// True if long batches pause between two pieces for batches of other models that would be late.
    pub preempt: bool,
    /// The limit on the total GPU memory of the warm standbys on each GPU, in bytes. `None` means
    /// half of the memory of a real GPU, and no limit on an emulated GPU.
    pub standby_memory: Option<u64>,
}

impl ControllerConfig {
    /// Returns the policy, or `None` for `static`, which does not decide shares.
    pub fn deciding_policy(&self) -> Option<Choice> {
        (self.policy != Choice::of(PolicyName::Static)).then_some(self.policy)
    }

    /// Returns true if batches pause for others.
    pub fn preempts(&self) -> bool {
        self.preempt && self.acting_policy().is_some_and(Choice::preempts)
    }

    /// Returns the policy if it decides shares and the supervisor applies its decisions.
    pub fn acting_policy(&self) -> Option<Choice> {
        self.deciding_policy().filter(|_| self.act)
    }
}

/// The limits on requests and connections.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LimitsConfig {
    /// The largest request that the supervisor accepts, in bytes.
    pub request_bytes: u64,
    /// The largest response to a batch, in bytes.
    pub response_bytes: u64,
    /// The limit on the total memory of all requests and responses in transit, in bytes. `None`
    /// means a quarter of the host's memory.
    pub memory: Option<u64>,
    /// The largest number of requests in flight, summed over all models.
    pub in_flight: usize,
    /// The largest number of client connections that are open at the same time.
    pub connections: usize,
    /// The time for which an HTTP connection without requests stays open.
    pub keep_alive: Duration,
    /// The clients with the permission to use tensors in shared memory.
    pub shared_memory: AllowedClients,
}

impl LimitsConfig {
    /// The default value of `limits.keep_alive`.
    pub const KEEP_ALIVE: Duration = Duration::from_secs(75);

    /// Returns the lower bound of `memory` in bytes. The memory must hold two requests of the
    /// largest size and their responses.
    pub fn least_memory(request_bytes: u64, response_bytes: u64) -> u64 {
        (4 * request_bytes.max(response_bytes)).max(4 << 20)
    }
}

/// The settings of worker processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkersConfig {
    /// The names of environment variables that workers inherit, in addition to those that every
    /// worker inherits.
    pub environment: Vec<String>,
    /// The range of user ids for workers, one id for each model. If `None`, workers run as the
    /// supervisor's user.
    pub users: Option<RangeInclusive<u32>>,
    /// The limit on the host memory of each worker, in bytes. `None` means no limit.
    pub memory: Option<u64>,
    /// The limit on the pinned host memory in which the weights of models that sleep wait, in bytes.
    /// `None` means half of the host's memory.
    pub host_memory: Option<u64>,
}

/// The settings of ONNX Runtime.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OnnxRuntimeConfig {
    /// The absolute path of the library, or `None` for the default path.
    pub library: Option<PathBuf>,
}

/// The settings of tracing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TracingConfig {
    /// The address of a collector that accepts OTLP over gRPC: `http://HOST:PORT`.
    pub otlp: String,
    /// The fraction of requests that are traced, among the requests whose client did not start a
    /// trace.
    pub sample: SampleRate,
    /// The service name that the traces show.
    pub service: String,
}

/// A fraction of requests, in millionths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleRate(u32);

impl SampleRate {
    /// The number of millionths that represents all requests (100 %).
    pub const ALL: u32 = 1_000_000;

    /// Returns the fraction of `parts` millionths, or `None` if `parts` is more than
    /// [`SampleRate::ALL`].
    pub fn new(parts: u32) -> Option<Self> {
        (parts <= Self::ALL).then_some(Self(parts))
    }

    /// Returns the fraction in millionths.
    pub fn parts(self) -> u32 {
        self.0
    }
}
