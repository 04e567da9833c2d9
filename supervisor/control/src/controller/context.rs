//! What all controllers share.

use std::path::PathBuf;
use std::sync::Arc;

use shadowslice_config::Timeouts;
use shadowslice_datapath::clock::Clock;

use super::groups::GroupLedger;
use super::memory::MemoryLedger;
use crate::backend::Gpus;
use crate::nvml::Readings;
use crate::process::{Programs, StartQueue, Users};

/// The parts of the supervisor that all controllers use.
#[derive(Debug, Clone)]
pub struct Context {
    pub programs: Programs,
    /// ONNX Runtime's library, if any model needs it.
    pub library: PathBuf,
    /// Where engines that were built for this GPU are kept.
    pub engines: PathBuf,
    /// The folder with a file for each worker that runs.
    pub register: PathBuf,
    /// Names of variables that workers have besides those that all have.
    pub variables: Vec<String>,
    /// In bytes, for each worker; `None` for no limit.
    pub worker_memory: Option<u64>,
    /// Where each model's workers run as a user of their own.
    pub users: Option<Arc<Users>>,
    pub timeouts: Timeouts,
    /// Bytes of one answer at most.
    pub response_bytes: u64,
    pub clock: Clock,
    pub data_path: tokio::runtime::Handle,
    /// Whether priorities that are lowered can be raised again.
    pub lower_shadows: bool,
    pub gpus: Gpus,
    pub readings: Arc<Readings>,
    /// What the models need of the GPUs' memory, by the index of the GPU.
    pub memory: Vec<Arc<MemoryLedger>>,
    /// Which model has which groups of SMs, by the index of the GPU.
    pub groups: Vec<Arc<GroupLedger>>,
    /// Whether a policy changes shares, so that one that is set by hand must be held.
    pub policy_acts: bool,
    /// The line in which all models start their workers.
    pub starts: Arc<StartQueue>,
}
