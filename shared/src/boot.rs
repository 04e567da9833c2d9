//! The wire of the boot: typed messages over `ipc-channel`, from a worker's first word to the
//! moment it can serve.
//!
//! ```text
//! supervisor                         worker
//!     │  spawn (server name, descriptors)
//!     │◀── Hello {orders} ─────────────│  connected
//!     │─── Load(Assignment) ──────────▶│
//!     │◀── Loaded {inputs, outputs} ───│  loaded
//!     │─── Warm(WarmUp) ──────────────▶│
//!     │◀── Warmed ─────────────────────│  warm: batches may come
//! ```
//!
//! At any point the worker may say `Refused` instead, and exit. The supervisor sends two messages and a
//! worker three, so a sick peer cannot fill the channel and block the other.

use std::path::PathBuf;
use std::time::Duration;

use ipc_channel::ipc::IpcSender;
use serde::{Deserialize, Serialize};

use crate::groups::{Division, Groups};
use crate::profile::Profile;
use crate::tensor::TensorSpec;
use crate::units::Sms;

/// Changes with every change of these messages; both sides must have the same.
pub const PROTOCOL: u32 = 5;

/// The descriptors that a worker inherits, by number.
pub mod descriptors {
    /// The socket of the data path.
    pub const BATCHES: i32 = 3;
    /// The model's request slab.
    pub const REQUESTS: i32 = 4;
    /// The worker's response slab.
    pub const RESPONSES: i32 = 5;
    /// The model's reference answers: written by a reference worker, sealed for the others.
    pub const REFERENCE: i32 = 6;
    /// The emulated GPU's pool; only there on an emulated device.
    pub const POOL: i32 = 7;
    /// The socket for regions of weights; only there in workers that serve.
    pub const WEIGHTS: i32 = 8;
}

/// The share's environment variable, read by CUDA and by the emulated device alike.
pub const SHARE_VARIABLE: &str = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE";

/// What a worker says.
#[derive(Debug, Serialize, Deserialize)]
pub enum WorkerSays {
    /// It runs, and takes orders at `orders`.
    Hello {
        /// Its [`PROTOCOL`].
        protocol: u32,
        /// Where it takes orders.
        orders: IpcSender<Order>,
    },
    /// The model is in memory.
    Loaded(Loaded),
    /// Every batch size has run, and the answers were right (or, from a reference worker: have been written).
    Warmed(Warmed),
    /// It cannot go on, and exits.
    Refused(BootRefusal),
}

/// What the supervisor orders.
#[derive(Debug, Serialize, Deserialize)]
pub enum Order {
    /// Load the model.
    Load(Box<Assignment>),
    /// Run every batch size once, and prove the answers.
    Warm(WarmUp),
}

/// What a worker is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Purpose {
    /// Serving requests.
    Serve,
    /// Computing the reference answers on the CPU, then exiting.
    Reference,
    /// The same on the device, where the CPU lacks operators of the model, such as those in BF16:
    /// operator by operator, on all SMs. Other workers are then compared with this device's
    /// answers.
    DeviceReference,
}

impl Purpose {
    /// Whether the worker exits once it has written the reference answers.
    pub fn is_reference(self) -> bool {
        matches!(self, Self::Reference | Self::DeviceReference)
    }

    /// Whether the worker uses the device.
    pub fn needs_device(self) -> bool {
        matches!(self, Self::Serve | Self::DeviceReference)
    }
}

/// All that a worker must know to load its model.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Assignment {
    /// The model's name, for messages.
    pub model: String,
    /// What the worker is for.
    pub purpose: Purpose,
    /// What runs the model.
    pub engine: EngineSpec,
    /// What it runs on.
    pub device: DeviceSpec,
    /// Execution, start-up and load times on an emulated device.
    pub profile: Option<Profile>,
    /// Bytes of the request slab.
    pub request_bytes: u64,
    /// Bytes of each of the response slab's slots.
    pub response_slot_bytes: u64,
    /// Where the model's share is a partition inside the process: the one to begin with.
    pub partition: Option<Partitioned>,
}

/// What a worker is told if its share is a partition inside the process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Partitioned {
    /// How the GPU divides into groups; a process that finds another division cannot serve.
    pub division: Division,
    /// The partition that is to be ready when the worker is warm.
    pub groups: Groups,
}

/// What runs a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum EngineSpec {
    /// ONNX Runtime.
    OnnxRuntime {
        /// The shared library.
        library: PathBuf,
        /// The model's file.
        path: PathBuf,
        /// Threads within one operator.
        threads: u32,
        /// The providers that compute on a GPU, the preferred one first; the host's processor takes
        /// operators that they lack.
        providers: Vec<Provider>,
        /// The folder in which optimised forms of the model are kept, if they are.
        optimised: Option<PathBuf>,
    },
    /// Answers with its input.
    Emulated {
        /// Which input comes back as which output.
        tensors: Vec<EchoTensor>,
        /// Whether shapes below are preceded by a batch axis.
        batched: bool,
    },
}

/// A provider of kernels for a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Provider {
    /// ONNX Runtime's own, on cuDNN and cuBLAS.
    Cuda,
    /// TensorRT's. Its engines are built for a share of the GPU and kept.
    TensorRt {
        /// Where the engines are kept.
        cache: PathBuf,
    },
}

/// One input of the emulated engine, and the output that repeats it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EchoTensor {
    /// The input, its shape without the batch axis.
    pub input: TensorSpec,
    /// The output's name.
    pub output: String,
}

/// What a model runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceSpec {
    /// The emulated GPU.
    Emulated {
        /// Its SMs.
        sms: Sms,
        /// The worker's place in the [pool](crate::pool).
        seat: u32,
    },
    /// The GPU that the environment lets the worker see, at the share that the environment says.
    Cuda,
}

/// What was found out about a model when it was loaded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Loaded {
    /// Its inputs, whole shapes.
    pub inputs: Vec<TensorSpec>,
    /// Its outputs, whole shapes.
    pub outputs: Vec<TensorSpec>,
    /// The SMs that the device really gave, read back from it.
    pub sms: Sms,
    /// Where the time of loading went.
    pub took: LoadTimes,
    /// By how many bytes the GPU's free memory shrank while the session was made; 0 on other
    /// devices.
    pub weights: u64,
}

/// How long the parts of loading took.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct LoadTimes {
    /// Loading the libraries of engine and device.
    pub libraries: Duration,
    /// Making the device's context, under the share.
    pub context: Duration,
    /// Making the session: reading the model and bringing its weights to the device.
    pub session: Duration,
}

/// What a warm-up has to run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WarmUp {
    /// Whether the first axis of every tensor is the batch.
    pub batched: bool,
    /// The batch sizes, ascending; `[1]` for a model without a batch axis.
    pub sizes: Vec<u32>,
    /// Per input: its shape without the batch axis, every axis known.
    pub shapes: Vec<Vec<i64>>,
}

/// What came of a warm-up.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Warmed {
    /// How long each size executed.
    pub times: Vec<WarmTime>,
    /// How long it took to run every size for the first time, where first runs take longer.
    pub warmup: Duration,
    /// How long it took to run every size once more and to compare the answers.
    pub proof: Duration,
    /// By how many bytes the GPU's free memory shrank in the warm-up; 0 on other devices.
    pub activations: u64,
    /// What was proven, where the share is a partition.
    pub partitions: Option<ProvenPartitions>,
    /// What it has of the device's memory, by kind.
    pub memory: DeviceMemory,
    /// Why it has weights of its own on a GPU, if it has some.
    pub unshared: Option<String>,
}

/// A worker's memory on its device, in bytes. Contexts, kernels and recordings are the rest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct DeviceMemory {
    /// Weights that all workers of the model share.
    pub weights: u64,
    /// Those of them that this worker brought there: the driver counts them as the worker's own.
    pub brought: u64,
    /// What is computed on the way from inputs to outputs.
    pub scratch: u64,
}

/// What a worker has proven of partitions.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProvenPartitions {
    /// What was proven of each number of groups.
    pub counts: Vec<PartitionProof>,
    /// The partition that is ready: the one that the worker was told to begin with, or as large a
    /// part of it as the model can have; the whole GPU if it can have none.
    pub ready: Groups,
}

/// What was proven of the partitions of so many groups.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PartitionProof {
    /// The number of groups.
    pub groups: usize,
    /// How every batch size fared; or why the model cannot have so many groups.
    pub result: Result<Vec<WarmTime>, String>,
}

/// How a batch size fared when it was warmed up.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct WarmTime {
    /// The batch size.
    pub rows: u32,
    /// How long it executed.
    pub took: Duration,
    /// How far its answers lay from the reference: the largest difference relative to the largest value.
    pub error: f64,
}

/// Why a worker cannot go on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum BootRefusal {
    /// ONNX Runtime's library cannot be loaded.
    #[error("ONNX Runtime's library cannot be used: {0}")]
    Library(String),
    /// The model cannot be loaded; trying again will not help.
    #[error("the model cannot be loaded: {0}")]
    Model(String),
    /// No kernel for one of the model's operators; another processor may have one.
    #[error("the model cannot be loaded: {0}")]
    NoOperator(String),
    /// The warm-up did not run.
    #[error("the warm-up failed at batch size {size}: {why}")]
    WarmUp {
        /// The batch size.
        size: u32,
        /// The engine's words.
        why: String,
    },
    /// The answers differ from the reference.
    #[error("answers are wrong at batch size {size}: {why}")]
    Proof {
        /// The batch size.
        size: u32,
        /// Which output, and by how much.
        why: String,
    },
    /// The environment, a descriptor or an order was wrong.
    #[error("the worker was not set up right: {0}")]
    Setup(String),
    /// The model's share cannot be a partition inside the process.
    #[error("its share cannot be a partition inside the process: {0}")]
    NoPartitions(String),
}
