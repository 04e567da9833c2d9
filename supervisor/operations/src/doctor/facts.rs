//! HostFacts that were found on a host, as plain data.

use std::error::Error;
use std::path::PathBuf;

use shadowslice_control::backend::Libraries;
use shadowslice_control::nvml;
use shadowslice_shared::errors;

pub(super) const MIB: u64 = 1 << 20;

#[derive(Debug, Clone, PartialEq)]
pub(super) struct HostFacts {
    pub(super) driver: DriverFacts,
    pub(super) mps: MpsFacts,
    pub(super) system: SystemFacts,
    pub(super) engine: EngineFacts,
    /// `None` unless it was measured whether partitions inside processes keep apart.
    pub(super) partitions: Option<Vec<PartitionMeasurement>>,
}

/// A measurement of a GPU under MPS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PartitionMeasurement {
    /// The GPU, as the configuration names it.
    pub(super) device: String,
    /// The SMs of each group, or why there are no partitions to rely on; or why nothing could be
    /// measured.
    pub(super) groups: Result<Result<Vec<u32>, String>, Problem>,
}

/// A part of the host that is missing or broken, and advice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Problem {
    pub(super) finding: String,
    pub(super) advice: String,
}

impl Problem {
    /// This program's errors say what failed and, behind the first semicolon, what to do; their
    /// causes say why.
    pub(super) fn of(error: &dyn Error) -> Self {
        let said = error.to_string();
        let (finding, advice) = said.split_once("; ").unwrap_or((&said, ""));
        let why = error.source().map(|cause| format!(": {}", errors::chain(cause))).unwrap_or_default();
        Self { finding: format!("{finding}{why}"), advice: advice.to_owned() }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct DriverFacts {
    pub(super) nvml: Result<nvml::Host, Problem>,
    pub(super) files: Vec<DeviceFile>,
    /// Processes on the GPUs that are neither workers nor MPS's, by number and name.
    pub(super) strangers: Vec<(u32, String)>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DeviceFile {
    pub(super) name: String,
    /// Whether this user may read and write it.
    pub(super) open: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MpsFacts {
    /// `nvidia-cuda-mps-control`, if it is in the PATH.
    pub(super) control: Option<MpsControlProgram>,
    /// Whether `nvidia-cuda-mps-server` lies beside it.
    pub(super) server: bool,
    /// Its processes, the supervisor's own left out.
    pub(super) foreign: Vec<MpsProcess>,
    /// The directories where CUDA looks for a daemon unasked, as far as they are there.
    pub(super) pipes: Vec<PipeDirectory>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MpsControlProgram {
    pub(super) path: PathBuf,
    /// As the driver gives it, 13000 for 13.0; or the driver's other answer.
    pub(super) version: Result<u32, String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MpsProcess {
    pub(super) kind: MpsKind,
    pub(super) pid: i32,
    pub(super) uid: u32,
    /// Its pipe directory, if this user may know it.
    pub(super) pipes: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum MpsKind {
    Control,
    Server,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PipeDirectory {
    pub(super) path: PathBuf,
    /// Whether a process listens there.
    pub(super) alive: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SystemFacts {
    /// Variables of the environment that CUDA or MPS reads.
    pub(super) variables: Vec<(String, String)>,
    pub(super) uid: u32,
    /// Whether a lowered CPU priority can be raised again.
    pub(super) may_raise_priority: bool,
    /// The most open files, and the most locked memory in bytes; `None` for no limit.
    pub(super) open_files: Option<u64>,
    pub(super) locked_memory: Option<u64>,
    /// Bytes of `/dev/shm`; `None` where there is none to write to.
    pub(super) shared_memory: Option<u64>,
    pub(super) run_dir: RunDir,
    pub(super) worker: Result<PathBuf, Problem>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RunDir {
    /// Neither the configuration nor the environment names a directory.
    Unknown,
    /// It can be made, or is there and can be written to.
    Usable(PathBuf),
    /// A supervisor serves there.
    Taken(PathBuf),
    Unusable(PathBuf, String),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct EngineFacts {
    /// ONNX Runtime's.
    pub(super) library: Result<PathBuf, Problem>,
    /// Tried by a worker's process; `None` if there is no such program.
    pub(super) loaded: Option<Result<Libraries, Problem>>,
}
