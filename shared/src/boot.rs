//! The wire of the boot: messages on a socket that the worker inherits, from its first word to the
//! moment it can serve.
//!
//! ```text
//! supervisor                         worker
//!     │  spawn (descriptors)
//!     │◀── Hello ─────────────────────│  connected
//!     │─── Load(Assignment) ──────────▶│
//!     │◀── Loaded {inputs, outputs} ───│  loaded
//!     │─── Warm(WarmUp) ──────────────▶│
//!     │◀── Warmed ─────────────────────│  warm: batches may come
//! ```
//!
//! At any point the worker may say `Refused` instead, and exit. The supervisor sends two messages
//! and a worker three, so a sick peer cannot fill the channel and block the other.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::frame::Message;
use crate::groups::{Division, Groups};
use crate::profile::Profile;
use crate::tensor::TensorSpec;
use crate::units::Sms;

/// Changes with every change of these messages.
pub const PROTOCOL: u32 = 13;

/// The numbers of the descriptors that a worker inherits.
pub mod descriptors {
    pub const BATCHES: i32 = 3;
    pub const REQUESTS: i32 = 4;
    pub const RESPONSES: i32 = 5;
    /// Written by a reference worker, sealed for the model's others.
    pub const REFERENCE: i32 = 6;
    /// Only there on an emulated device.
    pub const POOL: i32 = 7;
    /// The socket for regions of weights; only there in workers that serve.
    pub const WEIGHTS: i32 = 8;
    /// The socket of these messages, each a [frame](crate::frame).
    pub const BOOT: i32 = 9;
}

/// Read by CUDA and by the emulated device alike.
pub const SHARE_VARIABLE: &str = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE";

/// The environment variable that tells a worker its
/// [client priority](crate::contention::ClientPriority), as MPS reads it.
pub const PRIORITY_VARIABLE: &str = "CUDA_MPS_CLIENT_PRIORITY";

#[derive(Debug, Serialize, Deserialize)]
pub enum BootReply {
    Hello {
        protocol: u32,
    },
    Loaded(LoadedModel),
    /// From now on the worker tries batches of `rows` rows.
    Warming {
        rows: u32,
    },
    /// Every batch size has run, and the answers were right (by a reference worker: were written).
    Warmed(WarmUpReport),
    /// The worker exits.
    Refused(BootRefusal),
}

impl Message for BootReply {
    const MAX_BYTES: usize = 4 << 20;
}

#[derive(Debug, Serialize, Deserialize)]
pub enum BootCommand {
    Load(Box<Assignment>),
    /// Run every batch size once, and prove the answers.
    Warm(WarmUp),
}

/// Arrays of files that the operator gives take most of an order.
impl Message for BootCommand {
    const MAX_BYTES: usize = 20 << 20;
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum WorkerPurpose {
    Serve,
    /// Computing the reference answers on the CPU, then exiting.
    Reference,
    /// The same on the device, where the CPU lacks operators of the model, such as those in BF16:
    /// operator by operator, on all SMs. Other workers are then compared with this device's
    /// answers.
    DeviceReference,
}

impl WorkerPurpose {
    /// Whether the worker exits once it has written the reference answers.
    pub fn is_reference(self) -> bool {
        matches!(self, Self::Reference | Self::DeviceReference)
    }

    pub fn needs_device(self) -> bool {
        matches!(self, Self::Serve | Self::DeviceReference)
    }
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Assignment {
    /// For messages.
    pub model: String,
    pub purpose: WorkerPurpose,
    pub engine: EngineSpec,
    pub device: DeviceSpec,
    /// For an emulated device.
    pub profile: Option<Profile>,
    pub request_bytes: u64,
    /// Of each of the response slab's slots.
    pub response_slot_bytes: u64,
    /// The partition to begin with, where the share is one inside the process.
    pub partition: Option<PartitionSpec>,
}

impl Assignment {
    /// Whether the worker uses a real GPU.
    pub fn on_gpu(&self) -> bool {
        self.purpose.needs_device() && self.device == DeviceSpec::Cuda
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartitionSpec {
    /// A process that finds another division cannot serve.
    pub division: Division,
    /// To be ready when the worker is warm.
    pub groups: Groups,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum EngineSpec {
    OnnxRuntime {
        library: PathBuf,
        path: PathBuf,
        /// Threads within one operator.
        threads: u32,
        /// The preferred one first; the host's processor takes operators that they lack.
        providers: Vec<ProviderSpec>,
        /// The folder for optimised forms of the model, if they are kept.
        optimised: Option<PathBuf>,
    },
    /// A class in a Python file, in the interpreter whose process the worker is.
    Python {
        interpreter: PathBuf,
        path: PathBuf,
        /// That its libraries may use for one operator.
        threads: u32,
        /// The only folder for files of the model's own, if there is one.
        cache: Option<PathBuf>,
    },
    /// Answers with its input.
    Emulated {
        tensors: Vec<EchoTensor>,
        /// Whether a batch axis precedes the tensors' shapes.
        batched: bool,
    },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProviderSpec {
    /// ONNX Runtime's own, on cuDNN and cuBLAS.
    Cuda,
    /// Engines are built for a share of the GPU and kept in `cache`.
    TensorRt { cache: PathBuf },
}

/// One input of the emulated engine, and the output that repeats it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EchoTensor {
    /// The shape is without the batch axis.
    pub input: TensorSpec,
    pub output: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceSpec {
    Emulated {
        sms: Sms,
        /// The worker's place in the [pool](crate::pool).
        seat: u32,
    },
    /// The GPU that the environment lets the worker see, at the share that the environment says.
    Cuda,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadedModel {
    /// Whole shapes, as those of the outputs.
    pub inputs: Vec<TensorSpec>,
    /// The inputs that a request may leave out, as the model has defaults for them. They have no batch
    /// axis.
    pub optional: Vec<TensorSpec>,
    pub outputs: Vec<TensorSpec>,
    /// How many streams it generates at a time; 0 for a model that gives one answer to a request.
    pub streams: u32,
    /// What the device really gave, read back from it.
    pub sms: Sms,
    pub took: LoadTimes,
    /// By how many bytes the GPU's free memory shrank while the session was made; 0 on other
    /// devices.
    pub weights: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct LoadTimes {
    /// Of engine and device.
    pub libraries: Duration,
    /// Making the device's context, under the share.
    pub context: Duration,
    /// Reading the model and bringing its weights to the device.
    pub session: Duration,
}

/// The values of an input in the warm-up, where the operator gives some.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum InputValues {
    /// The elements one after the other, and again from the first one.
    Listed(Vec<ElementValue>),
    /// Drawn uniformly from `from` to `to`; whole numbers for integers.
    Range { from: f64, to: f64 },
    /// The bytes of each row; a batch takes the rows one after the other. A model without a batch axis
    /// has one row, which is the whole tensor.
    Rows(Arc<[RowBytes]>),
}

/// The bytes of a row. They may be many, and go into a message as they are.
pub type RowBytes = serde_bytes::ByteBuf;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ElementValue {
    Whole(i64),
    Number(f64),
    Text(String),
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct WarmUp {
    /// Whether the first axis of every tensor is the batch.
    pub batched: bool,
    /// Ascending; `[1]` for a model without a batch axis.
    pub sizes: Vec<u32>,
    /// Per input, without the batch axis; -1 for an axis that neither model nor operator fixes.
    pub shapes: Vec<Vec<i64>>,
    /// Per input; `None` for values that are made up.
    pub values: Vec<Option<InputValues>>,
    /// A batch that takes longer is of no use: a reference worker tries no larger ones. `None` if
    /// every size is tried.
    pub useful: Option<Duration>,
    /// Whether the configuration says how large batches are. Otherwise rows that may depend on each
    /// other are not batched.
    pub batch_is_given: bool,
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct WarmUpReport {
    /// By size. A reference worker tells those up to the first that takes too long to be useful.
    pub times: Vec<WarmTime>,
    /// Running every size for the first time, where first runs take longer.
    pub warmup: Duration,
    /// Running every size once more and comparing the answers.
    pub proof: Duration,
    /// By how many bytes the GPU's free memory shrank in the warm-up; 0 on other devices.
    pub activations: u64,
    /// Where the share is a partition.
    pub partitions: Option<ProvenPartitions>,
    /// The number of kernels of a recorded batch, if batches were recorded.
    pub kernels: Option<u32>,
    pub memory: DeviceMemory,
    /// Why it has weights of its own on a GPU, if it has some.
    pub unshared: Option<String>,
}

/// In bytes. Contexts, kernels and recordings are the rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct DeviceMemory {
    /// Shared by all workers of the model.
    pub weights: u64,
    /// The part of `weights` that this worker brought: the driver counts it as the worker's own.
    pub brought: u64,
    /// What is computed on the way from inputs to outputs.
    pub scratch: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProvenPartitions {
    pub counts: Vec<PartitionProof>,
    /// The partition that the worker was told to begin with, or as large a part of it as the model
    /// can have; the whole GPU if it can have none.
    pub ready: Groups,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PartitionProof {
    pub groups: usize,
    /// The times of the batch sizes that fit on that many groups, or the reason if none fits. Larger
    /// batches run on the whole GPU.
    pub result: Result<Vec<WarmTime>, String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct WarmTime {
    pub rows: u32,
    pub took: Duration,
    /// The largest difference from the reference, relative to the largest value.
    pub error: f64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum BootRefusal {
    #[error("ONNX Runtime's library cannot be used: {0}")]
    Library(String),
    /// Trying again will not help.
    #[error("the model cannot be loaded: {0}")]
    Model(String),
    /// No kernel for one of the model's operators; another processor may have one.
    #[error("the model cannot be loaded: {0}")]
    NoOperator(String),
    #[error("the warm-up failed at batch size {size}: {why}")]
    WarmUp {
        size: u32,
        /// The engine's words.
        why: String,
    },
    #[error("answers are wrong at batch size {size}: {why}")]
    Proof {
        size: u32,
        /// Names the output, and says by how much it differs.
        why: String,
    },
    /// Only from a reference worker: an answer depends on the other rows of its batch.
    #[error("{0}")]
    RowsDepend(String),
    /// The environment, a descriptor or an order was wrong.
    #[error("the worker was not set up right: {0}")]
    Setup(String),
    #[error("its share cannot be a partition inside the process: {0}")]
    NoPartitions(String),
    /// The next worker does otherwise.
    #[error("the model has to be loaded in another form: {0}")]
    OtherForm(String),
    /// Only for one who measures, as times depend on them.
    #[error("the model leaves axes free besides the batch: {0}")]
    FreeAxes(String),
}
