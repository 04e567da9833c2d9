//! The messages that the supervisor and a worker exchange from the start of the worker until it is
//! warm. The messages use a socket that the worker inherits.
//!
//! ```text
//! supervisor                         worker
//!     │  spawn (descriptors)
//!     │◀── Hello ─────────────────────│  connected
//!     │─── Load(Assignment) ──────────▶│
//!     │◀── Loaded {inputs, outputs} ───│  loaded
//!     │─── Warm(WarmUp) ──────────────▶│
//!     │◀── Warmed ─────────────────────│  warm: ready for batches
//! ```
//!
//! Instead of any of its messages, the worker can send `Refused` and exit. During the warm-up, the
//! worker also sends `Warming` for each batch size. Both sides send only a few messages, so neither
//! side can fill the socket and block the other side.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::batch::StreamLimits;
use crate::frame::Message;
use crate::groups::{Division, Groups};
use crate::profile::Profile;
use crate::tensor::TensorSpec;
use crate::units::Sms;

/// The version of these messages. Every change to them increments it.
pub const PROTOCOL: u32 = 16;

/// The numbers of the file descriptors that a worker inherits.
pub mod descriptors {
    /// The socket for [batches](crate::batch).
    pub const BATCHES: i32 = 3;
    /// The request slab, which the worker reads.
    pub const REQUESTS: i32 = 4;
    /// The response slab, which the worker writes.
    pub const RESPONSES: i32 = 5;
    /// The memory file for reference answers. A reference worker writes the file. For the model's other
    /// workers, the file is sealed.
    pub const REFERENCE: i32 = 6;
    /// The [state](crate::pool) of an emulated GPU. Workers on a real GPU do not inherit it.
    pub const POOL: i32 = 7;
    /// The socket for [regions of weights](crate::weights). Reference workers do not inherit it.
    pub const WEIGHTS: i32 = 8;
    /// The socket for the messages of this module, each in a [frame](crate::frame).
    pub const BOOT: i32 = 9;
}

/// The environment variable for the worker's share in percent. CUDA and the emulated device read it.
pub const SHARE_VARIABLE: &str = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE";

/// The environment variable for the worker's [client priority](crate::contention::ClientPriority). MPS
/// reads it.
pub const PRIORITY_VARIABLE: &str = "CUDA_MPS_CLIENT_PRIORITY";

/// A message from a starting worker to the supervisor.
#[derive(Debug, Serialize, Deserialize)]
pub enum BootReply {
    /// The worker has started.
    Hello {
        /// The version of the worker's messages, [`PROTOCOL`].
        protocol: u32,
        /// The id of the thread that loads the model and serves.
        thread: i32,
    },
    /// The worker has loaded the model.
    Loaded(LoadedModel),
    /// The worker is about to run batches of this size in its warm-up.
    Warming {
        /// The batch size in rows.
        rows: u32,
    },
    /// The worker is warm: it has run every batch size. The worker's answers match the reference
    /// answers. A reference worker has written the reference answers instead.
    Warmed(WarmUpReport),
    /// The worker cannot start. It exits after this message.
    Refused(BootRefusal),
}

impl Message for BootReply {
    const MAX_BYTES: usize = 4 << 20;
}

/// A message from the supervisor to a starting worker.
#[derive(Debug, Serialize, Deserialize)]
pub enum BootCommand {
    /// The order to load the model.
    Load(Box<Assignment>),
    /// The order to run every batch size, and to compare the answers with the reference answers.
    Warm(WarmUp),
}

/// The maximum size is large, because a command can contain the arrays that the operator provides for
/// the warm-up.
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
    /// The worker computes the reference answers on the device, then exits. The worker runs one
    /// operator at a time, on all SMs. This purpose is for models with operators that the CPU does not
    /// support, such as operators in BF16.
    DeviceReference,
}

impl WorkerPurpose {
    /// Returns whether the worker exits after it has written the reference answers.
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
    /// The name of the model, for error messages and logs.
    pub model: String,
    /// The purpose of the worker.
    pub purpose: WorkerPurpose,
    /// The engine that runs the model.
    pub engine: EngineSpec,
    /// The device on which the worker runs.
    pub device: DeviceSpec,
    /// The model's profile. Only emulated devices need it.
    pub profile: Option<Profile>,
    /// The size of the request slab in bytes.
    pub request_bytes: u64,
    /// The size in bytes of the part at the start of the request slab that the GPU reads directly.
    pub pinned_request_bytes: u64,
    /// The size of each slot of the response slab in bytes.
    pub response_slot_bytes: u64,
    /// The worker's first partition, or `None` if the worker's share is not a partition inside the
    /// process.
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
    /// The division of the GPU into groups that the supervisor expects. If the worker finds another
    /// division, it refuses to start.
    pub division: Division,
    /// The groups of the partition. The worker prepares the partition before it reports that it is
    /// warm.
    pub groups: Groups,
}

/// The engine that runs a model, and the engine's settings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum EngineSpec {
    /// ONNX Runtime.
    OnnxRuntime {
        /// The path of ONNX Runtime's shared library.
        library: PathBuf,
        /// The path of the model file.
        path: PathBuf,
        /// The number of threads that ONNX Runtime uses within one operator.
        threads: u32,
        /// The execution providers, in order of preference. The CPU runs operators that no provider
        /// supports.
        providers: Vec<ProviderSpec>,
        /// The directory in which ONNX Runtime's optimised copies of the model are kept. If this is
        /// `None`, no copies are kept.
        optimised: Option<PathBuf>,
    },
    /// A class in a Python file. The worker process is a Python interpreter.
    Python {
        /// The path of the interpreter.
        interpreter: PathBuf,
        /// The path of the file, or of a directory with `model.py`.
        path: PathBuf,
        /// The maximum number of threads that the model's libraries use within one operator.
        threads: u32,
        /// The only directory to which the model is allowed to write files, or `None` if the model must
        /// not write files.
        cache: Option<PathBuf>,
        /// The time after which a step of streams is interrupted.
        step_timeout: Duration,
    },
    /// The emulated engine, which returns the inputs as outputs.
    Emulated {
        /// The inputs, each with the output that repeats it.
        tensors: Vec<EchoTensor>,
        /// True if the tensors have a batch axis in front of the shapes given here.
        batched: bool,
    },
}

/// An execution provider of ONNX Runtime.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProviderSpec {
    /// ONNX Runtime's CUDA provider, which uses cuDNN and cuBLAS.
    Cuda,
    /// TensorRT. Each of its engines is built for one share of the GPU.
    TensorRt {
        /// The directory in which the engines are cached.
        cache: PathBuf,
    },
}

/// An input of the emulated engine, and the output that repeats it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EchoTensor {
    /// The input. The shape omits the batch axis.
    pub input: TensorSpec,
    /// The name of the output.
    pub output: String,
}

/// The device on which a worker runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceSpec {
    /// An emulated GPU.
    Emulated {
        /// The number of SMs of the whole GPU.
        sms: Sms,
        /// The worker's seat in the [pool](crate::pool).
        seat: u32,
    },
    /// A real GPU. Environment variables select the GPU and the share.
    Cuda,
}

/// The description of a loaded model that the worker sends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadedModel {
    /// The required inputs. Their shapes include the batch axis.
    pub inputs: Vec<TensorSpec>,
    /// The optional inputs, which have defaults in the model and no batch axis.
    pub optional: Vec<TensorSpec>,
    /// The outputs. Their shapes include the batch axis.
    pub outputs: Vec<TensorSpec>,
    /// The number of streams that the model can generate, or `None` if it gives one answer per request.
    pub streams: Option<StreamLimits>,
    /// The number of SMs that the device reports to the process.
    pub sms: Sms,
    /// The durations of the loading steps.
    pub took: LoadTimes,
    /// The decrease of the GPU's free memory during the creation of the session, in bytes. It is 0
    /// without a real GPU.
    pub weights: u64,
}

/// The durations of the steps in which a worker loads a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct LoadTimes {
    /// The time to load the libraries of the engine and of the device.
    pub libraries: Duration,
    /// The time to create the device's context with the worker's share.
    pub context: Duration,
    /// The time to read the model and copy its weights to the device.
    pub session: Duration,
}

/// The values of one input in the warm-up, as the operator configured them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum InputValues {
    /// A list of elements. The worker repeats the list until the tensor is full.
    Listed(Vec<ElementValue>),
    /// Uniformly distributed random values. Integer tensors get whole numbers.
    Range {
        /// The smallest value.
        from: f64,
        /// The largest value.
        to: f64,
    },
    /// The bytes of each row. A batch uses the rows in order. If the model has no batch axis, the only
    /// row is the whole tensor.
    Rows(Arc<[RowBytes]>),
}

/// The bytes of a row. Serde writes them as one byte string.
pub type RowBytes = serde_bytes::ByteBuf;

/// The value of one element of an input.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ElementValue {
    /// A whole number.
    Whole(i64),
    /// A number that is not whole.
    Number(f64),
    /// A string, for BYTES tensors.
    Text(String),
}

/// The settings of a worker's warm-up.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct WarmUp {
    /// True if the first axis of every tensor is the batch axis.
    pub batched: bool,
    /// The batch sizes in rows, in ascending order. For a model without a batch axis, this is `[1]`.
    pub sizes: Vec<u32>,
    /// The shape of each input without the batch axis. An axis is -1 if neither the model nor the
    /// operator gives its length.
    pub shapes: Vec<Vec<i64>>,
    /// The values of each input. If an entry is `None`, the worker generates the values of that input.
    pub values: Vec<Option<InputValues>>,
    /// The maximum batch time that is useful under the model's SLO. A reference worker stops after the
    /// first batch size that takes longer. If this is `None`, the worker runs all sizes.
    pub useful: Option<Duration>,
    /// True if the configuration sets the maximum batch size. If this is false, and answers may depend
    /// on the other rows of the batch, the model runs without batching.
    pub batch_is_given: bool,
}

/// The result of a worker's warm-up.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WarmUpReport {
    /// The execution time of each batch size. A reference worker reports the sizes up to the first one
    /// that takes longer than [`WarmUp::useful`].
    pub times: Vec<WarmTime>,
    /// The total time of the first runs of all batch sizes. It is zero if first runs do not take longer
    /// than later runs.
    pub warmup: Duration,
    /// The time to run every batch size again and compare the answers with the reference.
    pub proof: Duration,
    /// The decrease of the GPU's free memory during the warm-up, in bytes. It is 0 without a real GPU.
    pub activations: u64,
    /// The partitions that the worker can use, or `None` if its share is not a partition.
    pub partitions: Option<ProvenPartitions>,
    /// The number of kernels in a recorded batch (a CUDA graph), or `None` if the worker recorded no
    /// batch.
    pub kernels: Option<u32>,
    /// The number of pieces of the largest batch, or the reason why the worker's batches are not cut. The
    /// supervisor can pause only batches that are cut.
    pub pieces: Result<u32, String>,
    /// The GPU memory that the worker uses.
    pub memory: DeviceMemory,
    /// The reason why the worker does not share its weights with other workers on the GPU. This is
    /// `None` if the worker shares its weights or does not use a GPU.
    pub unshared: Option<String>,
    /// The size in bytes of the GPU memory that the worker releases while the model sleeps, or the
    /// reason why the model cannot sleep.
    pub sleep: Result<u64, String>,
}

impl Default for WarmUpReport {
    /// Returns the report of a worker that measured nothing and cannot sleep.
    fn default() -> Self {
        Self {
            times: Vec::new(),
            warmup: Duration::ZERO,
            proof: Duration::ZERO,
            activations: 0,
            partitions: None,
            kernels: None,
            pieces: Err("the worker has not reported whether it cuts batches into pieces".to_owned()),
            memory: DeviceMemory::default(),
            unshared: None,
            sleep: Err("the worker has not reported whether the model can sleep".to_owned()),
        }
    }
}

/// The GPU memory of a worker in bytes, without contexts, kernels and recorded batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct DeviceMemory {
    /// The size of the weights that all workers of the model share.
    pub weights: u64,
    /// The size of the part of `weights` that this worker allocated. The CUDA driver attributes this
    /// part to the worker.
    pub brought: u64,
    /// The size of the buffers for intermediate results.
    pub scratch: u64,
}

/// The partitions on which the worker has run the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProvenPartitions {
    /// The results, one for each number of groups that was tried.
    pub counts: Vec<PartitionProof>,
    /// The partition that is ready. Usually this is the partition in [`PartitionSpec`]. If the model
    /// cannot use that partition, the largest usable part of that partition is ready. If the model can
    /// use no partition, the whole GPU is ready.
    pub ready: Groups,
}

/// The result of running the model on partitions of one size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PartitionProof {
    /// The number of groups of these partitions.
    pub groups: usize,
    /// The times of the batch sizes that the model can run on this number of groups, or the reason why
    /// it can run no batch size. Larger batches run on the whole GPU.
    pub result: Result<Vec<WarmTime>, String>,
}

/// The measured time of a batch size in the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct WarmTime {
    /// The batch size in rows.
    pub rows: u32,
    /// The execution time.
    pub took: Duration,
    /// The largest difference from the reference answers, relative to the largest value in the
    /// reference answers.
    pub error: f64,
}

/// The reason why a worker cannot start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum BootRefusal {
    /// ONNX Runtime's library is missing or unusable.
    #[error("cannot use ONNX Runtime: {0}; run `shadowslice doctor`")]
    Library(String),
    /// The worker cannot load the model. Another attempt would also fail.
    #[error("the model cannot be loaded: {0}")]
    Model(String),
    /// The device has no kernel for one of the model's operators. Another device may support the
    /// operator.
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
    #[error(
        "answers at batch size {size} differ from the reference answers: {why}; if the model is correct, try another share or `handover`"
    )]
    Proof {
        /// The batch size in rows.
        size: u32,
        /// The name of the output and its difference from the reference answer.
        why: String,
    },
    /// An answer depends on the other rows of its batch. Only reference workers check this.
    #[error("{0}")]
    RowsDepend(String),
    /// The MPS server accepts no further process.
    #[error("the GPU has no free MPS client: {0}; set `isolation: shared`")]
    NoClient(String),
    /// The environment, a descriptor or a command is invalid.
    #[error("the worker cannot start: {0}")]
    Setup(String),
    /// The device or the engine does not support partitions.
    #[error("the share cannot be a partition inside the worker process: {0}")]
    NoPartitions(String),
    /// The model must be loaded in another form, for example without the channels-last layout. The
    /// supervisor starts another worker, which loads that form.
    #[error("the model must be loaded in another form: {0}")]
    OtherForm(String),
    /// The model has free axes in addition to the batch axis. `shadowslice profile` refuses such a
    /// model, because the execution times depend on the lengths of the free axes.
    #[error("the model has free axes besides the batch: {0}")]
    FreeAxes(String),
}
