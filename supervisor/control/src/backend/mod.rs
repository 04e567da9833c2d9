//! The GPUs, which turn a worker's share into the environment of its process. The trait
//! [`GpuBackend`] has three implementations: [`EmulatedBackend`], [`MpsGpu`] and [`WholeGpu`], which
//! enforces no share.

mod command;
mod emulated;
mod grant;
mod mps;
mod probe;
mod whole;

use std::fmt;
use std::os::fd::BorrowedFd;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};
use shadowslice_shared::boot::DeviceSpec;
use shadowslice_shared::groups::Division;
use shadowslice_shared::pool::SEATS;
use shadowslice_shared::units::{Percent, Sms};

use shadowslice_datapath::pipeline::{GpuSmTime, Occupancy};

pub(crate) use command::CommandError;
pub use emulated::EmulatedBackend;
pub use grant::Grant;
pub use mps::{Control, Limits, MpsError, MpsGpu, MpsHandover, MpsSetup, control_program};
pub(crate) use probe::ProbeRunError;
pub use probe::{
    IsolationProbe, OnnxRuntime, Probed, ProbedLibraries, isolation, libraries, probe, python_fault,
};
pub use whole::WholeGpu;

pub type Variables = Vec<(&'static str, String)>;

/// A future to wait for. The backend that returns it limits the time of the wait.
pub type Wait = Pin<Box<dyn Future<Output = ()> + Send>>;

pub(crate) const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// The variable that keeps ONNX Runtime from sending usage data to its vendor and from storing it.
pub(crate) const NO_TELEMETRY: (&str, &str) = ("ORT_DISABLE_TELEMETRY", "1");

pub(crate) const PIPE_DIRECTORY: &str = "CUDA_MPS_PIPE_DIRECTORY";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GrantRequest {
    pub share: Percent,
    /// The priority of the model. 1 is the highest.
    pub priority: u32,
    /// The maximum GPU memory of the worker in bytes.
    pub memory_limit: Option<u64>,
    pub room: Option<Room>,
    /// True if the worker joins a shared process.
    pub joins: bool,
}

/// The memory that a worker needs and the memory that is free, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    pub needed: u64,
    /// The free memory at the last reading.
    pub free: u64,
}

/// The fixed properties of a GPU, and the use that workers make of it.
#[derive(Debug)]
pub struct BackendFacts {
    /// The name of the GPU in the configuration.
    pub device: String,
    /// The UUID, or `None` for an emulated GPU.
    pub uuid: Option<String>,
    pub kind: BackendKind,
    pub sms: Sms,
    /// The division of the SMs into groups, or the reason why processes cannot use partitions.
    pub division: Result<Arc<Division>, String>,
    /// The occupancy of the GPU by executing workers.
    pub occupancy: Arc<Occupancy>,
    /// The SM time that models use.
    pub sm_time: Arc<GpuSmTime>,
    /// The memory in bytes that is reserved for workers that have not allocated it yet.
    reserved: AtomicU64,
}

impl BackendFacts {
    /// Creates the facts of an idle GPU.
    fn new(
        device: String,
        uuid: Option<String>,
        kind: BackendKind,
        sms: Sms,
        division: Result<Arc<Division>, String>,
    ) -> Self {
        // Without MPS, workers take turns, and no share is enforced.
        let occupancy = Occupancy::new(kind != BackendKind::None);
        let sizes = division.as_ref().map_or_else(|_| vec![sms], |division| division.sizes().to_vec());
        let sm_time = GpuSmTime::new(sizes);
        Self { device, uuid, kind, sms, division, occupancy, sm_time, reserved: AtomicU64::new(0) }
    }

    /// Returns the memory that is reserved for workers that start, in bytes.
    pub fn reserved(&self) -> u64 {
        self.reserved.load(Ordering::Relaxed)
    }

    /// Returns the part of `free` bytes that is not reserved.
    pub fn unreserved(&self, free: u64) -> u64 {
        free.saturating_sub(self.reserved.load(Ordering::Relaxed))
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GrantError {
    #[error("the emulated GPU already has {SEATS} workers; stop some models")]
    NoSeat,
    #[error(
        "the GPU has no free MPS client ({used} in use); set `isolation: shared` for some of its models, or move models to another GPU"
    )]
    NoClient {
        /// The number of processes of this supervisor on the GPU.
        used: usize,
    },
    /// The GPU recovers from a fault, and accepts workers later.
    #[error("{0}")]
    Recovering(String),
    #[error(
        "the worker needs {} of GPU memory, and {} are free; free GPU memory, use fewer `batch.sizes`, or move a model to another GPU",
        gib(*needed), gib(*free)
    )]
    NoMemory {
        /// The needed memory in bytes, like `free`.
        needed: u64,
        free: u64,
    },
}

/// A backend's identifier for an admitted worker: a seat, or the generation of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lease(pub(crate) u64);

/// The kind of a GPU's backend, with its word in the JSON of `status`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BackendKind {
    Emulated,
    Mps,
    /// A CUDA GPU without MPS.
    None,
    #[serde(other)]
    Unknown,
}

pub trait GpuBackend: fmt::Debug + Send + Sync {
    fn facts(&self) -> &BackendFacts;

    /// Returns the process ID of the MPS server, if the GPU has one.
    ///
    /// # Errors
    ///
    /// Returns the reason why the GPU accepts no workers at present.
    fn server(&self) -> Result<Option<i32>, String> {
        Ok(None)
    }

    fn sms(&self, share: Percent) -> Sms;

    /// Returns true unless the GPU is emulated.
    fn is_real(&self) -> bool {
        self.facts().uuid.is_some()
    }

    fn division(&self) -> Result<&Arc<Division>, &str> {
        self.facts().division.as_ref().map_err(String::as_str)
    }

    /// Admits a worker. This function never waits. `joins` is true if the worker joins a process that
    /// was admitted before.
    fn enter(&self, joins: bool) -> Result<Lease, GrantError>;

    /// Ends the lease of a worker that has exited.
    fn leave(&self, _lease: Lease, _joins: bool) {}

    /// Records that the GPU accepted no further process. Until a process leaves, the GPU admits none.
    fn refuses_processes(&self) {}

    fn environment(&self, wanted: &GrantRequest) -> Variables;

    fn device(&self, lease: Lease) -> DeviceSpec;

    /// Returns the memory that the workers of an emulated GPU share.
    fn pool(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Checks that a worker runs on its part of the GPU. Blocks while it communicates with MPS.
    fn admit(&self, wanted: &GrantRequest, pid: i32, found: Sms) -> Result<(), String>;

    /// Ends the worker's GPU work before a kill, if that is possible.
    fn terminate(&self, _pid: i32) -> Option<Wait> {
        None
    }

    /// Waits until the GPU has noticed the worker's exit.
    fn departed(&self, _pid: i32) -> Option<Wait> {
        None
    }

    /// Waits until the worker of this lease has certainly lost its context, even if the worker has
    /// not noticed this.
    fn lost(&self, _lease: Lease) -> Option<Wait> {
        None
    }

    /// Returns the MPS daemon that another supervisor can take over.
    fn handover(&self) -> Option<MpsHandover> {
        None
    }

    /// Passes the MPS daemon to another supervisor.
    fn pass(&self) {}

    /// Keeps the MPS daemon that this supervisor has taken over.
    fn keep(&self) {}

    /// Stops the MPS daemon, unless it was passed on. Call this after all workers have exited.
    /// `at_once` skips the orderly stop.
    fn stop(&self, _at_once: bool) {}
}

/// The GPUs in the order of the configuration.
pub type Gpus = Vec<Arc<dyn GpuBackend>>;

/// Returns the MPS variables of this process, which must not reach a worker.
pub fn inherited_settings() -> impl Iterator<Item = std::ffi::OsString> {
    let is_mps = |name: &std::ffi::OsString| name.to_string_lossy().starts_with("CUDA_MPS_");
    std::env::vars_os().map(|(name, _)| name).filter(move |name| is_mps(name))
}

pub fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}

/// Describes how a child ended.
pub fn shown(status: &std::io::Result<std::process::ExitStatus>) -> String {
    match status {
        Ok(status) => status.to_string(),
        Err(error) => format!("unknown: {error}"),
    }
}
