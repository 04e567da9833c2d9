//! The messages with which the supervisor adds models to a shared worker, which is one process for
//! several models. Each model is a *member* of the process, with a thread of its own.
//!
//! ```text
//! supervisor                          shared worker
//!     │─── Setup ───────────────────────▶│  first
//!     │─── Join {model} + descriptors ──▶│  a thread starts
//!     │◀══ boot, batches: the member's own sockets, as for a worker with one model
//!     │◀── exit code, over the member's lifeline, once its resources are free
//! ```
//!
//! If the supervisor closes the socket, the process exits after its last member.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The number of the socket for these messages, which a shared worker inherits.
pub const MEMBERS: i32 = 11;

/// The number that stands for a member's lifeline in [`JoinRequest::descriptors`]. The lifeline is a
/// pipe to the supervisor. The member writes its exit code, which is one byte, and then closes the pipe.
pub const LIFELINE: i32 = 10;

/// A message from the supervisor to a shared worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum MembersCommand {
    /// The settings of the process. This is the first message.
    Setup(SharedSetup),
    /// A model that the process must run, with the descriptors of its worker.
    Join(JoinRequest),
}

/// The settings of a shared worker that all its members have in common.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedSetup {
    /// The path of ONNX Runtime's shared library, or `None` if no member needs it.
    pub library: Option<PathBuf>,
    /// The directory to which members write their models' optimised forms, or `None`.
    pub engines: Option<PathBuf>,
    /// True if the members run on a real GPU.
    pub on_gpu: bool,
}

/// A request to run a model in a shared worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinRequest {
    /// The name of the model, for the thread and for log messages.
    pub model: String,
    /// The numbers that a worker with one model would use for the descriptors, in the order of the
    /// message's descriptors. See [`crate::boot::descriptors`] and [`LIFELINE`].
    pub descriptors: Vec<i32>,
    /// True if the member must load the model with the lowest CPU priority, because other models serve.
    pub low_priority: bool,
}
