//! Partitioning: from a share to the environment that a new worker must have. One trait,
//! [`GpuBackend`], and three backends: [`EmulatedGpu`], [`MpsGpu`], and [`WholeGpu`], on which no
//! share is enforced.

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

use shadowslice_shared::boot::DeviceSpec;
use shadowslice_shared::groups::Division;
use shadowslice_shared::pool::SEATS;
use shadowslice_shared::units::{Percent, Sms};

use shadowslice_datapath::pipeline::Occupancy;

pub(crate) use command::CommandError;
pub use emulated::EmulatedGpu;
pub use grant::{Admission, Grant};
pub use mps::{Control, Limits, MpsError, MpsEstate, MpsGpu, MpsSetup, control_program};
pub(crate) use probe::ProbeError;
pub use probe::{Isolation, Libraries, OnnxRuntime, Probed, isolation, libraries, probe, python_fault};
pub use whole::WholeGpu;

pub type Environment = Vec<(&'static str, String)>;

/// Something to wait for; the backend that returns it bounds the wait.
pub type Wait = Pin<Box<dyn Future<Output = ()> + Send>>;

pub(crate) const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// ONNX Runtime reports its use to its maker, and keeps files for that, unless told not to.
pub(crate) const NO_TELEMETRY: (&str, &str) = ("ORT_DISABLE_TELEMETRY", "1");

pub(crate) const PIPE_DIRECTORY: &str = "CUDA_MPS_PIPE_DIRECTORY";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GrantRequest {
    pub share: Percent,
    /// Its model's priority; 1 is the highest.
    pub priority: u32,
    /// The most GPU memory that it may take, in bytes.
    pub memory_limit: Option<u64>,
    pub room: Option<Room>,
}

/// Memory in bytes: what a worker will take, and what there is of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    pub needed: u64,
    /// A moment ago.
    pub free: u64,
}

#[derive(Debug)]
pub struct GpuUsage {
    occupancy: Arc<Occupancy>,
    /// Bytes of memory promised to workers that have not taken them yet.
    reserved: Arc<AtomicU64>,
}

impl GpuUsage {
    /// `divides`: whether a worker is confined to its share.
    fn new(divides: bool) -> Self {
        Self { occupancy: Occupancy::new(divides), reserved: Arc::default() }
    }

    /// What is left of so many free bytes when every worker has taken what it was promised.
    pub fn unreserved(&self, free: u64) -> u64 {
        free.saturating_sub(self.reserved.load(Ordering::Relaxed))
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GrantError {
    #[error("the emulated GPU already has {SEATS} workers; stop some models")]
    NoSeat,
    /// The GPU recovers from a fault, and will take a worker later.
    #[error("{0}")]
    Recovering(String),
    #[error(
        "the worker needs {} of GPU memory, and {} are free; free GPU memory, use fewer `batch.sizes`, or move a model to another GPU",
        gib(*needed), gib(*free)
    )]
    NoMemory {
        /// In bytes, as is `free`.
        needed: u64,
        free: u64,
    },
}

/// What a backend remembers of a worker that it let in: a seat, or the life of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lease(pub(crate) u64);

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackendStatus {
    /// As the configuration names it.
    pub device: String,
    pub uuid: Option<String>,
    /// `emulated`, `mps` or `none`.
    pub backend: &'static str,
    pub sms: Sms,
    pub mps_server_pid: Option<i32>,
    /// Why it takes no workers, if it takes none.
    pub why: Option<String>,
}

pub trait GpuBackend: fmt::Debug + Send + Sync {
    fn status(&self) -> BackendStatus;

    fn sms(&self, share: Percent) -> Sms;

    /// How its SMs divide into groups; else why processes cannot have partitions of their own.
    fn division(&self) -> Result<&Arc<Division>, &str>;

    fn usage(&self) -> &GpuUsage;

    /// What executes on it.
    fn occupancy(&self) -> &Arc<Occupancy> {
        &self.usage().occupancy
    }

    /// Lets a worker in. Never waits.
    fn enter(&self) -> Result<Lease, GrantError>;

    /// The worker is dead.
    fn leave(&self, _lease: Lease) {}

    fn environment(&self, wanted: &GrantRequest) -> Environment;

    fn device(&self, lease: Lease) -> DeviceSpec;

    /// The memory that the workers of an emulated GPU share.
    fn pool(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// May block, for as long as a conversation with the MPS daemon takes.
    fn admit(&self, wanted: &GrantRequest, pid: i32, found: Sms) -> Result<(), String>;

    /// Before a kill: ends what the worker runs on the GPU, as far as that is possible.
    fn terminate(&self, _pid: i32) -> Option<Wait> {
        None
    }

    /// After the exit: waits until the GPU has noticed.
    fn departed(&self, _pid: i32) -> Option<Wait> {
        None
    }

    /// Ends when the worker of this lease has surely lost its context, even if it does not know.
    fn lost(&self, _lease: Lease) -> Option<Wait> {
        None
    }

    /// What it runs that another supervisor can take over.
    fn estate(&self) -> Option<MpsEstate> {
        None
    }

    /// From now on another supervisor keeps that,
    fn pass(&self) {}

    /// or this one does, which has taken it over.
    fn keep(&self) {}

    /// Ends what the backend runs, at once if need be, unless it was passed on. The workers are gone.
    fn stop(&self, _at_once: bool) {}
}

/// The GPUs, as the configuration orders them.
pub type Gpus = Vec<Arc<dyn GpuBackend>>;

/// The variables of this process that are MPS's, and must not reach a worker by chance.
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
