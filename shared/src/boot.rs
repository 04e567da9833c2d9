//! The messages of a worker's start, on a socket that the worker inherits: from its first message until
//! it is warm.
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
//! At any point the worker may send `Refused` instead, and exit. The supervisor sends two messages, and
//! the worker sends three besides `Warming`, so a faulty peer cannot fill the socket and block the
//! other side.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::frame::Message;
use crate::groups::{Division, Groups};
use crate::profile::Profile;
use crate::tensor::TensorSpec;
use crate::units::Sms;

/// The version of these messages, which every change to them increments.
pub const PROTOCOL: u32 = 13;

/// The numbers of the file descriptors that a worker inherits.
pub mod descriptors {
    /// The socket for [batches](crate::batch).
    pub const BATCHES: i32 = 3;
    /// The request slab, which the worker reads.
    pub const REQUESTS: i32 = 4;
    /// The response slab, which the worker writes.
    pub const RESPONSES: i32 = 5;
    /// The memory file for reference answers. A reference worker writes it; it is sealed for the
    /// model's other workers.
    pub const REFERENCE: i32 = 6;
    /// The [state](crate::pool) of an emulated GPU. Workers on a real GPU do not inherit it.
    pub const POOL: i32 = 7;
    /// The socket for [regions of weights](crate::weights). Reference workers do not inherit it.
    pub const WEIGHTS: i32 = 8;
    /// The socket of these messages, each a [frame](crate::frame).
    pub const BOOT: i32 = 9;
}

/// The environment variable with the worker's share in percent, which CUDA and the emulated device
/// read.
pub const SHARE_VARIABLE: &str = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE";

/// The environment variable with the worker's
/// [client priority](crate::contention::ClientPriority), which MPS reads.
pub const PRIORITY_VARIABLE: &str = "CUDA_MPS_CLIENT_PRIORITY";

/// A message from a starting worker to the supervisor.
#[derive(Debug, Serialize, Deserialize)]
pub enum BootReply {
    /// The worker runs.
    Hello {
        /// The worker's [`PROTOCOL`].
        protocol: u32,
    },
    /// The worker has loaded the model.
    Loaded(LoadedModel),
    /// The worker starts to run batches of this size.
    Warming {
        /// The batch size in rows.
        rows: u32,
    },
    /// The worker has run every batch size. Its answers match the reference answers; a reference worker
    /// has written them.
    Warmed(WarmUpReport),
    /// The worker cannot start, and exits.
    Refused(BootRefusal),
}

impl Message for BootReply {
    const MAX_BYTES: usize = 4 << 20;
}

/// A message from the supervisor to a starting worker.
#[derive(Debug, Serialize, Deserialize)]
pub enum BootCommand {
    /// The worker loads the model.
    Load(Box<Assignment>),
    /// The worker runs every batch size and checks the answers.
    Warm(WarmUp),
}

/// Most of a command's bytes are arrays from files that the operator gives for the warm-up.
impl Message for BootCommand {
    const MAX_BYTES: usize = 20 << 20;
}

/// The purpose of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum WorkerPurpose {
    /// The worker serves requests.
    Serve,
    /// The worker computes the reference answers on the CPU, then exits.
    Reference,
    /// The worker computes the reference answers on the device, operator by operator and on all SMs,
    /// then exits. This is for models with operators that the CPU does not have, such as those in
    /// BF16. Other workers are then compared with the device's own answers.
    DeviceReference,
}

impl WorkerPurpose {
    /// Returns whether the worker exits once it has written the reference answers.
    pub fn is_reference(self) -> bool {
        matches!(self, Self::Reference | Self::DeviceReference)
    }

    /// Returns whether the worker runs the model on the device rather than on the CPU.
    pub fn needs_device(self) -> bool {
        matches!(self, Self::Serve | Self::DeviceReference)
    }
}

/// Everything that a worker needs to load its model.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Assignment {
    /// The model's name, for messages.
    pub model: String,
    /// The purpose of the worker.
    pub purpose: WorkerPurpose,
    /// The engine that runs the model.
    pub engine: EngineSpec,
    /// The device that the worker uses.
    pub device: DeviceSpec,
    /// The model's profile, which an emulated device needs.
    pub profile: Option<Profile>,
    /// The size of the request slab in bytes.
    pub request_bytes: u64,
    /// The size of each slot of the response slab in bytes.
    pub response_slot_bytes: u64,
    /// The worker's first partition, if its share is a partition inside the process.
    pub partition: Option<PartitionSpec>,
}

impl Assignment {
    /// Returns whether the worker uses a real GPU.
    pub fn on_gpu(&self) -> bool {
        self.purpose.needs_device() && self.device == DeviceSpec::Cuda
    }
}

/// The first partition of a worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartitionSpec {
    /// The division of the GPU that the supervisor expects. A worker that finds another one refuses.
    pub division: Division,
    /// The groups of the partition, which must be ready when the worker is warm.
    pub groups: Groups,
}

/// The engine of a model, and its settings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum EngineSpec {
    /// ONNX Runtime.
    OnnxRuntime {
        /// The path of ONNX Runtime's library.
        library: PathBuf,
        /// The path of the model's file.
        path: PathBuf,
        /// The number of threads within one operator.
        threads: u32,
        /// The execution providers, the preferred one first. The CPU runs operators that none of them
        /// supports.
        providers: Vec<ProviderSpec>,
        /// The folder for optimised forms of the model, if they are kept.
        optimised: Option<PathBuf>,
    },
    /// A class in a Python file. The worker is the process of the interpreter.
    Python {
        /// The path of the interpreter.
        interpreter: PathBuf,
        /// The path of the file, or of a folder with `model.py`.
        path: PathBuf,
        /// The number of threads that the model's libraries may use within one operator.
        threads: u32,
        /// The only folder in which the model may write its own files, if there is one.
        cache: Option<PathBuf>,
    },
    /// An engine that answers with its inputs.
    Emulated {
        /// The inputs and the outputs that repeat them.
        tensors: Vec<EchoTensor>,
        /// True if a batch axis precedes the tensors' shapes.
        batched: bool,
    },
}

/// An execution provider of ONNX Runtime.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProviderSpec {
    /// ONNX Runtime's CUDA provider, which uses cuDNN and cuBLAS.
    Cuda,
    /// TensorRT, which builds its engines for one share of the GPU.
    TensorRt {
        /// The folder that keeps the engines.
        cache: PathBuf,
    },
}

/// One input of the emulated engine, and the output that repeats it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EchoTensor {
    /// The input. Its shape has no batch axis.
    pub input: TensorSpec,
    /// The name of the output.
    pub output: String,
}

/// The device of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceSpec {
    /// An emulated GPU.
    Emulated {
        /// The number of SMs of the whole GPU.
        sms: Sms,
        /// The worker's seat in the [pool](crate::pool).
        seat: u32,
    },
    /// A real GPU. The environment selects the GPU and the share.
    Cuda,
}

/// The worker's description of the model that it has loaded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadedModel {
    /// The required inputs, with whole shapes.
    pub inputs: Vec<TensorSpec>,
    /// The inputs that a request may omit because the model has defaults for them. They have no batch
    /// axis.
    pub optional: Vec<TensorSpec>,
    /// The outputs, with whole shapes.
    pub outputs: Vec<TensorSpec>,
    /// The number of streams that the model can generate at once; 0 if it gives one answer per request.
    pub streams: u32,
    /// The number of SMs that the device reports for the process.
    pub sms: Sms,
    /// The durations of loading.
    pub took: LoadTimes,
    /// The decrease of the GPU's free memory while the session was created, in bytes; 0 on other
    /// devices.
    pub weights: u64,
}

/// The durations of the steps of loading a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct LoadTimes {
    /// The time to load the libraries of engine and device.
    pub libraries: Duration,
    /// The time to create the device's context, under the share.
    pub context: Duration,
    /// The time to read the model and copy its weights to the device.
    pub session: Duration,
}

/// The values that the operator gives for an input in the warm-up.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum InputValues {
    /// A list of elements, which repeats from its start until the tensor is full.
    Listed(Vec<ElementValue>),
    /// Uniformly distributed random values; whole numbers for integer tensors.
    Range {
        /// The smallest value.
        from: f64,
        /// The largest value.
        to: f64,
    },
    /// The bytes of each row. A batch takes the rows in order. A model without a batch axis has one
    /// row, which is the whole tensor.
    Rows(Arc<[RowBytes]>),
}

/// The bytes of a row, which serde writes as one byte string.
pub type RowBytes = serde_bytes::ByteBuf;

/// A value for one element of an input.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ElementValue {
    /// A whole number.
    Whole(i64),
    /// Another number.
    Number(f64),
    /// A text, for BYTES tensors.
    Text(String),
}

/// The settings of a worker's warm-up.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct WarmUp {
    /// True if the first axis of every tensor is the batch.
    pub batched: bool,
    /// The batch sizes in rows, ascending; `[1]` for a model without a batch axis.
    pub sizes: Vec<u32>,
    /// The shape of each input without the batch axis. An axis is -1 if neither the model nor the
    /// operator fixes its length.
    pub shapes: Vec<Vec<i64>>,
    /// The values of each input, or `None` for values that the worker makes up.
    pub values: Vec<Option<InputValues>>,
    /// The longest useful time of a batch. A reference worker runs no batch size after the first one
    /// that takes longer. If `None`, it runs every size.
    pub useful: Option<Duration>,
    /// True if the configuration gives the batch size. Otherwise the model is not batched if an answer
    /// may depend on the other rows of its batch.
    pub batch_is_given: bool,
}

/// The result of a worker's warm-up.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct WarmUpReport {
    /// The time of each batch size. A reference worker reports the sizes up to the first one that takes
    /// longer than is useful.
    pub times: Vec<WarmTime>,
    /// The time to run every size for the first time, if first runs take longer.
    pub warmup: Duration,
    /// The time to run every size once more and compare the answers.
    pub proof: Duration,
    /// The decrease of the GPU's free memory during the warm-up, in bytes; 0 on other devices.
    pub activations: u64,
    /// The partitions that the worker can use, if its share is a partition.
    pub partitions: Option<ProvenPartitions>,
    /// The number of kernels of a recorded batch, if the worker recorded batches.
    pub kernels: Option<u32>,
    /// The GPU memory that the worker uses.
    pub memory: DeviceMemory,
    /// The reason why the worker does not share its weights on a GPU with other workers, if it does not.
    pub unshared: Option<String>,
}

/// The GPU memory of a worker in bytes, without contexts, kernels and recordings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct DeviceMemory {
    /// The weights that all workers of the model share.
    pub weights: u64,
    /// The part of `weights` that this worker allocated. The driver counts it as the worker's memory.
    pub brought: u64,
    /// The buffers for intermediate results.
    pub scratch: u64,
}

/// The partitions in which the worker has run the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProvenPartitions {
    /// The result for each number of groups.
    pub counts: Vec<PartitionProof>,
    /// The partition that is ready: the one in [`PartitionSpec`], or the largest part of it that the
    /// model can use, or the whole GPU if the model can use none.
    pub ready: Groups,
}

/// The result of running the model on a number of groups.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PartitionProof {
    /// The number of groups.
    pub groups: usize,
    /// The times of the batch sizes that fit on these groups, or the reason why none fits. Larger
    /// batches run on the whole GPU.
    pub result: Result<Vec<WarmTime>, String>,
}

/// The time of a batch in the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct WarmTime {
    /// The batch size in rows.
    pub rows: u32,
    /// The execution time.
    pub took: Duration,
    /// The largest difference from the reference answers, relative to their largest value.
    pub error: f64,
}

/// The reason why a worker cannot start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum BootRefusal {
    /// ONNX Runtime's library is missing or unusable.
    #[error("ONNX Runtime's library cannot be used: {0}")]
    Library(String),
    /// The model cannot be loaded, and a retry does not help.
    #[error("the model cannot be loaded: {0}")]
    Model(String),
    /// The device has no kernel for one of the model's operators. Another device may have one.
    #[error("the model cannot be loaded: {0}")]
    NoOperator(String),
    /// A batch failed in the warm-up.
    #[error("the warm-up failed at batch size {size}: {why}")]
    WarmUp {
        /// The batch size in rows.
        size: u32,
        /// The engine's error.
        why: String,
    },
    /// An answer differs from the reference answer.
    #[error("answers are wrong at batch size {size}: {why}")]
    Proof {
        /// The batch size in rows.
        size: u32,
        /// The name of the output, and its difference from the reference.
        why: String,
    },
    /// An answer depends on the other rows of its batch. A reference worker finds this out.
    #[error("{0}")]
    RowsDepend(String),
    /// The environment, a descriptor or a command is invalid.
    #[error("the supervisor started the worker with an invalid setup: {0}")]
    Setup(String),
    /// The device or the engine does not support partitions.
    #[error("the share cannot be a partition inside the worker process: {0}")]
    NoPartitions(String),
    /// The model must be loaded in another form, which the next worker does.
    #[error("the model must be loaded in another form: {0}")]
    OtherForm(String),
    /// The model has free axes besides the batch. `shadowslice profile` refuses such a model, because
    /// its times depend on those axes.
    #[error("the model has free axes besides the batch: {0}")]
    FreeAxes(String),
}
