//! The context that all controllers share.

use std::path::PathBuf;
use std::sync::Arc;

use shadowslice_config::Timeouts;
use shadowslice_datapath::clock::Clock;
use shadowslice_datapath::pipeline::GpuPauses;
use shadowslice_datapath::tenants::Tenants;

use super::groups::GroupLedger;
use super::memory::MemoryLedger;
use crate::backend::Gpus;
use crate::nvml::Readings;
use crate::process::{SharedProcesses, StartQueue, Users, WorkerSettings};
use crate::residency::ResidencyBoard;

/// The parts of the supervisor that all controllers use.
#[derive(Debug, Clone)]
pub struct Context {
    pub workers: WorkerSettings,
    /// The path of ONNX Runtime's library, if a model needs it.
    pub library: PathBuf,
    /// The folder for optimised models and engines.
    pub engines: PathBuf,
    /// The users of the models' workers. `None` if all workers run as the supervisor's user.
    pub users: Option<Arc<Users>>,
    pub timeouts: Timeouts,
    /// The largest size of an answer, in bytes.
    pub response_bytes: u64,
    pub clock: Clock,
    /// True if the process priority of shadows can be lowered, because it can be raised again.
    pub lower_shadows: bool,
    pub gpus: Gpus,
    pub readings: Arc<Readings>,
    /// The ledgers of the GPUs' memory, by the index of the GPU.
    pub memory: Vec<Arc<MemoryLedger>>,
    /// The ledgers of the GPUs' groups of SMs, by the index of the GPU.
    pub groups: Vec<Arc<GroupLedger>>,
    /// The pauses of the GPUs' workers, by the index of the GPU.
    pub pauses: Vec<Arc<GpuPauses>>,
    /// The tenants, among which the GPUs divide their SM time.
    pub tenants: Arc<Tenants>,
    /// True if a policy changes shares. In that case, a share that an operator sets is held.
    pub policy_acts: bool,
    /// The processes in which several models have their workers.
    pub shared: Arc<SharedProcesses>,
    /// The results of the task that decides which models sleep.
    pub residency: Arc<ResidencyBoard>,
    /// The queue in which all models wait to start their workers.
    pub starts: Arc<StartQueue>,
}
