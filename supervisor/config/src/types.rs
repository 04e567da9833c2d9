//! The checked configuration: all defaults are filled in and all values are valid.

mod model;

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

use super::faults::ConfigFault;
use super::peers::{AllowedClients, Peers};

/// The file descriptors of a supervisor without models, besides those of connections up to the limit.
const DESCRIPTORS_OF_ALL: u64 = 150;
/// The file descriptors of the supervisor for each model.
const DESCRIPTORS_OF_A_MODEL: u64 = 10;

/// The whole configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The absolute path of the run directory.
    pub run_dir: PathBuf,
    /// The addresses of the supervisor's servers.
    pub listen: ListenConfig,
    /// The GPUs, at least one.
    pub gpus: Vec<GpuConfig>,
    /// The models, at least one, with different names.
    pub models: Vec<ModelConfig>,
    /// The users and groups that may send commands to the control socket, besides root and the
    /// supervisor's user. `None` if nobody else may.
    pub control: Option<Peers>,
    /// The clients that may load and unload models.
    pub model_control: AllowedClients,
    /// The settings of the sharing policy.
    pub controller: ControllerConfig,
    /// The limits on requests and connections.
    pub limits: LimitsConfig,
    /// The time limits of workers.
    pub timeouts: Timeouts,
    /// The time for which a stopping host is unready but still serves requests.
    pub lame_duck: Duration,
    /// True if the supervisor exits when a model cannot start. Otherwise it serves the other models.
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
    /// The faults of the models' own files. `check` refuses them; `serve` starts the other models.
    pub file_faults: Vec<ConfigFault>,
    /// The users, groups, cores and files that the configuration names and this host does not have.
    pub host_faults: Vec<ConfigFault>,
    /// Notes on settings that have no effect in this configuration or are probably wrong.
    pub notes: Vec<ConfigFault>,
}

impl Config {
    /// Returns the number of file descriptors that the supervisor needs besides those of connections.
    pub fn own_descriptors(&self) -> u64 {
        DESCRIPTORS_OF_ALL + DESCRIPTORS_OF_A_MODEL * self.models.len() as u64
    }
}

/// The models that must be ready for the host to be ready.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum ReadyConfig {
    /// All models.
    All,
    /// Any model, once each model of the start has either been ready or failed for good.
    #[default]
    Any,
    /// The models with these names.
    Each(Vec<String>),
}

/// The addresses of the supervisor's servers. All addresses differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListenConfig {
    /// The addresses for inference over HTTP.
    pub http: Vec<Listener>,
    /// The addresses for inference over gRPC.
    pub grpc: Vec<Listener>,
    /// The addresses for metrics.
    pub metrics: Vec<Listener>,
}

/// The default mode of a Unix socket: its owner and its group may connect.
pub const SOCKET_MODE: u32 = 0o660;

/// An address on which the supervisor listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Listener {
    /// A Unix socket.
    Unix {
        /// The absolute path, short enough for a socket's address.
        path: PathBuf,
        /// The file mode, or `None` for [`SOCKET_MODE`].
        mode: Option<u32>,
        /// The group of the socket's file.
        group: Option<String>,
        /// The users and groups that may connect, or `None` for everybody whom the mode allows.
        peers: Option<Peers>,
    },
    /// A TCP port.
    Tcp {
        /// The IP address and the port.
        address: SocketAddr,
        /// The settings of TLS, or `None` for connections without encryption.
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
    /// The CA that signs clients' certificates, or `None` if clients need no certificate.
    pub client_ca: Option<PathBuf>,
}

/// A GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GpuConfig {
    /// An emulated GPU, on which batches take the times in the models' profiles.
    Emulated {
        /// The number of SMs.
        sms: Sms,
    },
    /// A real GPU.
    Cuda {
        /// The index or UUID of the GPU.
        device: CudaDevice,
        /// The mechanism that enforces shares.
        partition: Partitioning,
    },
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
    /// The policy. Under `static`, shares stay the same until an operator resizes them.
    pub policy: Choice,
    /// The time between two decisions.
    pub interval: Duration,
    /// True if the supervisor applies the decisions, and does not only report them.
    pub act: bool,
    /// The memory limit of all warm standbys of a GPU together, in bytes. `None` for half of the memory
    /// of a real GPU, and for no limit on an emulated GPU.
    pub standby_memory: Option<u64>,
}

impl ControllerConfig {
    /// Returns the policy if it decides shares, and `None` for `static`.
    pub fn deciding_policy(&self) -> Option<Choice> {
        (self.policy != Choice::of(PolicyName::Static)).then_some(self.policy)
    }

    /// Returns the policy if it decides shares and the supervisor applies its decisions.
    pub fn acting_policy(&self) -> Option<Choice> {
        self.deciding_policy().filter(|_| self.act)
    }
}

/// The limits on requests and connections.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LimitsConfig {
    /// The largest request in bytes.
    pub request_bytes: u64,
    /// The largest answer to a batch in bytes.
    pub response_bytes: u64,
    /// The memory limit of all requests and answers in transit together, in bytes. `None` for a quarter
    /// of the host's memory.
    pub memory: Option<u64>,
    /// The largest number of requests in flight, in all models together.
    pub in_flight: usize,
    /// The largest number of client connections.
    pub connections: usize,
    /// The time for which an HTTP connection stays open without a request.
    pub keep_alive: Duration,
    /// The clients that may use tensors in shared memory.
    pub shared_memory: AllowedClients,
}

impl LimitsConfig {
    /// The default of `keep_alive`.
    pub const KEEP_ALIVE: Duration = Duration::from_secs(75);

    /// Returns the lower bound of `memory` in bytes: the largest request and its answer must fit beside
    /// another request and its answer.
    pub fn least_memory(request_bytes: u64, response_bytes: u64) -> u64 {
        (4 * request_bytes.max(response_bytes)).max(4 << 20)
    }
}

/// The settings of worker processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkersConfig {
    /// The names of environment variables that workers inherit, besides those that every worker
    /// inherits.
    pub environment: Vec<String>,
    /// The user ids under which workers run, one for each model. `None` for the supervisor's user.
    pub users: Option<RangeInclusive<u32>>,
    /// The limit on the host memory of each worker in bytes, or `None` for no limit.
    pub memory: Option<u64>,
}

/// The settings of ONNX Runtime.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OnnxRuntimeConfig {
    /// The absolute path of the library, or `None` for its default path.
    pub library: Option<PathBuf>,
}

/// The settings of tracing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TracingConfig {
    /// The address of a collector that accepts OTLP over gRPC: `http://HOST:PORT`.
    pub otlp: String,
    /// The fraction of requests that start a trace. Requests that belong to a trace already do not
    /// count.
    pub sample: SampleRate,
    /// The service name in traces.
    pub service: String,
}

/// A fraction of requests, in millionths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SampleRate(u32);

impl SampleRate {
    /// The number of millionths in the whole.
    pub const ALL: u32 = 1_000_000;

    /// The default: one request in a hundred.
    pub const DEFAULT: Self = Self(Self::ALL / 100);

    /// Returns the fraction of `parts` millionths, or `None` if that is more than [`SampleRate::ALL`].
    pub fn new(parts: u32) -> Option<Self> {
        (parts <= Self::ALL).then_some(Self(parts))
    }

    /// Returns the fraction in millionths.
    pub fn parts(self) -> u32 {
        self.0
    }
}
