//! The checked configuration: every default filled in, nothing left that could be wrong.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

pub use shadowslice_policy::sharing::Choice;
use shadowslice_policy::sharing::PolicyName;
pub use shadowslice_policy::workers::{HandoverMode, Timeouts};
use shadowslice_shared::boot::EchoTensor;
use shadowslice_shared::profile::Profile;
use shadowslice_shared::units::{Percent, Sms};

use super::faults::Fault;

/// Descriptors that the supervisor takes, beside connections.
const DESCRIPTORS_OF_ALL: u64 = 100;
/// Descriptors that a model takes.
const DESCRIPTORS_OF_A_MODEL: u64 = 10;

/// The supervisor's configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Where the sockets lie; absolute.
    pub run_dir: PathBuf,
    /// Where clients reach it.
    pub listen: Listen,
    /// The GPUs; never empty.
    pub gpus: Vec<Gpu>,
    /// The models; never empty, names differ.
    pub models: Vec<Model>,
    /// Whether clients load and unload models.
    pub model_control: bool,
    /// How shares are decided.
    pub controller: Controller,
    /// Bounds on clients' requests.
    pub limits: Limits,
    /// How long the phases of a hand-over may take.
    pub timeouts: Timeouts,
    /// Whether nothing is served when a model cannot be started; else the other models are.
    pub strict_start: bool,
    /// ONNX Runtime.
    pub onnxruntime: OnnxRuntime,
    /// Where traces of requests go; `None` if no request is traced.
    pub tracing: Option<Tracing>,
    /// Faults of the models' own files. `check` refuses them; `serve` starts the other models.
    pub file_faults: Vec<Fault>,
    /// Settings that have no effect in this configuration, or cannot be right.
    pub notes: Vec<Fault>,
}

impl Config {
    /// Descriptors that the supervisor and its models take, beside connections.
    pub fn own_descriptors(&self) -> u64 {
        DESCRIPTORS_OF_ALL + DESCRIPTORS_OF_A_MODEL * self.models.len() as u64
    }
}

/// The sockets that are listened on; no two are the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listen {
    /// The Open Inference Protocol over HTTP.
    pub http: Vec<Listener>,
    /// The Open Inference Protocol over gRPC.
    pub grpc: Vec<Listener>,
    /// Metrics over HTTP.
    pub metrics: Vec<Listener>,
}

/// One socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listener {
    /// Where.
    pub address: Address,
    /// The file mode of a Unix socket; `None` leaves it to the umask.
    pub mode: Option<u32>,
    /// The group that a Unix socket is given to.
    pub group: Option<String>,
}

/// Where a socket listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// A Unix socket; the path is absolute and fits into a socket's address.
    Unix(PathBuf),
    /// A TCP socket.
    Tcp(SocketAddr),
}

/// One GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Gpu {
    /// A pool of SMs that takes as long as the profiles say.
    Emulated {
        /// Its SMs.
        sms: Sms,
    },
    /// A real GPU.
    Cuda {
        /// Which.
        device: CudaDevice,
        /// The mechanism that enforces shares there.
        partition: Partitioning,
    },
}

/// The mechanism that enforces shares on a real GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Partitioning {
    /// NVIDIA MPS.
    Mps,
    /// Nothing does.
    None,
}

/// Which real GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CudaDevice {
    /// By its index.
    Index(u32),
    /// By its UUID, `GPU-...`.
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

/// One model.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    /// Its name in the protocol.
    pub name: String,
    /// The engine that runs it.
    pub engine: Engine,
    /// The index of its GPU in [`Config::gpus`].
    pub gpu: usize,
    /// Its times and memory; `None` if no profile was given, or the given profile is broken.
    pub profile: Option<Profile>,
    /// Where the profile was read from; absolute.
    pub profile_path: Option<PathBuf>,
    /// Its share of the GPU.
    pub share: Share,
    /// Its promise to clients.
    pub slo: Slo,
    /// How its requests are batched.
    pub batch: Batch,
    /// How its requests wait.
    pub queue: Queue,
    /// 1 is the highest.
    pub priority: u32,
    /// How its share is changed.
    pub handover: HandoverMode,
    /// Whether a second worker is kept warm at the share in force, to serve if the other one dies.
    pub standby: bool,
    /// The cores its workers are pinned to; empty where they are not.
    pub cpus: Vec<usize>,
    /// The most GPU memory that a worker of it may take, in bytes; real GPUs only.
    pub memory_limit: Option<u64>,
    /// Per input: the shape to warm up with, without the batch axis.
    pub warmup: BTreeMap<String, Vec<i64>>,
    /// A fault of its own files. Such a model stays unready.
    pub broken: Option<String>,
}

/// The engine that runs a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Engine {
    /// ONNX Runtime.
    OnnxRuntime {
        /// The model's file; absolute.
        path: PathBuf,
        /// Threads within one operator, on the CPU.
        threads: u32,
        /// The providers that compute on a real GPU, the preferred provider first; empty on an
        /// emulated GPU.
        providers: Vec<Provider>,
    },
    /// Answers with its input, after the time its profile says.
    Emulated {
        /// Which input comes back as which output.
        tensors: Vec<EchoTensor>,
    },
}

impl Engine {
    /// Whether TensorRT computes some of it.
    pub fn has_tensorrt(&self) -> bool {
        matches!(self, Self::OnnxRuntime { providers, .. } if providers.contains(&Provider::TensorRt))
    }
}

/// A provider of kernels for a real GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Provider {
    /// ONNX Runtime's own.
    Cuda,
    /// TensorRT's.
    TensorRt,
}

/// A model's share: `min <= initial <= max`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// The share that it starts with.
    pub initial: Percent,
    /// Whether the configuration says so, so that no policy starts it with something else.
    pub given: bool,
    /// Its least share.
    pub min: Percent,
    /// Its largest share.
    pub max: Percent,
}

/// A service level objective: `percentile` percent of the requests are answered within `latency`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Slo {
    /// The latency; above zero.
    pub latency: Duration,
    /// The percentile; above 0 and below 100.
    pub percentile: f64,
}

/// How requests are batched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// The largest batch, 0 for a model without a batch axis. `None` until the model says whether
    /// it has a batch axis: see [`Batch::resolve`].
    pub max: Option<u32>,
    /// The sizes to warm up, ascending to `max`; `None` for powers of two.
    pub sizes: Option<Vec<u32>>,
    /// How long a batch may wait to grow although it could run.
    pub max_delay: Duration,
}

impl Batch {
    /// The largest batch where the configuration leaves it to the model, and the model has a batch axis.
    pub const DEFAULT_MAX: u32 = 32;

    /// The largest batch (0: no batch axis) and the sizes to warm up, of a model that turned out to
    /// have a batch axis or not.
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

/// How requests wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Queue {
    /// The most requests that wait or run; more are refused.
    pub max_requests: usize,
    /// The bytes of the model's request slab; at least one request fits.
    pub memory: u64,
    /// The treatment of a request that does not run in time.
    pub on_late: OnLate,
}

/// The treatment of a request that does not run in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnLate {
    /// It is refused.
    Reject,
    /// It is answered late.
    Serve,
}

/// How shares are decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Controller {
    /// The policy that decides. Under `static` nothing is decided: shares stay until an operator
    /// resizes them.
    pub policy: Choice,
    /// How often.
    pub interval: Duration,
    /// Whether decisions are carried out, or only reported.
    pub act: bool,
    /// The most memory that the standing workers of a GPU may take together, in bytes. `None`: half
    /// of the memory of a real GPU, and no bound on an emulated GPU.
    pub standby_memory: Option<u64>,
}

impl Controller {
    /// The policy, if it decides shares.
    pub fn decides(&self) -> Option<Choice> {
        (self.policy != Choice::of(PolicyName::Static)).then_some(self.policy)
    }

    /// The policy, if it decides shares and its decisions are carried out.
    pub fn acts(&self) -> Option<Choice> {
        self.decides().filter(|_| self.act)
    }
}

/// Bounds on clients' requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of one request.
    pub request_bytes: u64,
    /// Bytes of one batch's answer.
    pub response_bytes: u64,
    /// Requests in all models together.
    pub in_flight: usize,
    /// Open connections.
    pub connections: usize,
    /// Whether clients may have tensors in their shared memory read and written.
    pub shared_memory: bool,
}

/// ONNX Runtime.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OnnxRuntime {
    /// Its shared library, as an absolute path. `None`: the library in its usual place.
    pub library: Option<PathBuf>,
}

/// Where traces of requests go, and of which requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tracing {
    /// The collector, which speaks OTLP over gRPC: `http://HOST:PORT`.
    pub otlp: String,
    /// How many of the requests that belong to no trace yet begin a trace.
    pub sample: Sample,
    /// The name that the traces are found under.
    pub service: String,
}

/// A part of the requests, in parts of a million.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample(u32);

impl Sample {
    /// All requests.
    pub const ALL: u32 = 1_000_000;

    /// One request in a hundred.
    pub const DEFAULT: Self = Self(Self::ALL / 100);

    /// So many of [`Sample::ALL`]; `None` if that is more than all.
    pub fn new(parts: u32) -> Option<Self> {
        (parts <= Self::ALL).then_some(Self(parts))
    }

    /// So many of [`Sample::ALL`].
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
        let batch = |max, sizes| Batch { max, sizes, max_delay: Duration::ZERO };
        assert_eq!(batch(None, None).resolve(true), (32, vec![1, 2, 4, 8, 16, 32]));
        assert_eq!(batch(None, None).resolve(false), (0, vec![1]));
        assert_eq!(batch(Some(4), Some(vec![3, 4])).resolve(true), (4, vec![3, 4]));
    }
}
