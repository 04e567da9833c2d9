//! The facts about a host, as plain data structures.

use std::error::Error;
use std::path::PathBuf;

use shadowslice_control::backend::ProbedLibraries;
use shadowslice_control::nvml;
use shadowslice_shared::errors;

pub(super) const MIB: u64 = 1 << 20;

/// All facts about a host.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct HostFacts {
    pub(super) driver: DriverFacts,
    pub(super) mps: MpsFacts,
    pub(super) system: SystemFacts,
    pub(super) engine: EngineFacts,
    /// The measured isolation of partitions inside a process, or `None` if it was not measured.
    pub(super) partitions: Option<Vec<PartitionMeasurement>>,
}

/// The result of measuring, under MPS, whether the partitions of a GPU are isolated from each
/// other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PartitionMeasurement {
    /// The GPU's name in the configuration.
    pub(super) device: String,
    /// The SMs of each group, or the reason why partitions cannot be used. The outer error says why
    /// the measurement failed.
    pub(super) groups: Result<Result<Vec<u32>, String>, Problem>,
}

/// A fault of the host, and advice on how to correct it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Problem {
    pub(super) finding: String,
    pub(super) advice: String,
}

impl Problem {
    /// Splits the text of an error into a finding and advice. The text before the first semicolon
    /// says what failed, and the text after it says what to do. The error's causes are appended to
    /// the finding.
    pub(super) fn of(error: &dyn Error) -> Self {
        let text = error.to_string();
        let (finding, advice) = text.split_once("; ").unwrap_or((&text, ""));
        let why = error.source().map(|cause| format!(": {}", errors::chain(cause))).unwrap_or_default();
        Self { finding: format!("{finding}{why}"), advice: advice.to_owned() }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub(super) struct DriverFacts {
    pub(super) nvml: Result<nvml::NvmlHost, Problem>,
    pub(super) files: Vec<DeviceFile>,
    /// The processes of other programs on the GPUs: neither workers nor MPS processes.
    pub(super) foreign: Vec<ForeignProcess>,
}

/// A process of another program on a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ForeignProcess {
    pub(super) pid: u32,
    pub(super) name: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DeviceFile {
    pub(super) name: String,
    /// True if this user has the permission to read and write the device file.
    pub(super) open: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MpsFacts {
    /// The program `nvidia-cuda-mps-control`, or `None` if it is not in a folder of `PATH`.
    pub(super) control: Option<MpsControlProgram>,
    /// True if `nvidia-cuda-mps-server` is in the same folder.
    pub(super) server: bool,
    /// The MPS processes that no supervisor started.
    pub(super) foreign: Vec<MpsProcess>,
    /// The existing pipe directories in which CUDA looks for an MPS daemon: the directory that the
    /// environment names, and the default directories.
    pub(super) pipes: Vec<PipeDirectory>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MpsControlProgram {
    pub(super) path: PathBuf,
    /// The version, for example 13000 for 13.0. The error is the program's output if it contains no
    /// version.
    pub(super) version: Result<u32, String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct MpsProcess {
    pub(super) kind: MpsKind,
    pub(super) pid: i32,
    pub(super) uid: u32,
    /// The process's pipe directory, or `None` if this user cannot read the process's environment.
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
    /// True if a process listens in the directory.
    pub(super) alive: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SystemFacts {
    /// The environment variables that CUDA or MPS reads.
    pub(super) variables: Vec<(String, String)>,
    pub(super) uid: u32,
    /// True if this user has the permission to raise a CPU priority after lowering it.
    pub(super) may_raise_priority: bool,
    /// The limit on open files, or `None` for unlimited.
    pub(super) open_files: Option<u64>,
    /// The limit on locked memory in bytes, or `None` for unlimited.
    pub(super) locked_memory: Option<u64>,
    /// The size of `/dev/shm` in bytes, or `None` if this user cannot write to it.
    pub(super) shared_memory: Option<u64>,
    pub(super) run_dir: RunDirState,
    pub(super) worker: Result<PathBuf, Problem>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum RunDirState {
    /// Neither the configuration nor the environment names a directory.
    Unknown,
    /// This user can write to the directory, or can create it.
    Usable(PathBuf),
    /// Another supervisor uses the directory.
    Taken(PathBuf),
    /// The directory cannot be used. The text says why.
    Unusable(PathBuf, String),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct EngineFacts {
    /// The path of the ONNX Runtime library.
    pub(super) library: Result<PathBuf, Problem>,
    /// The libraries that a worker process could load, or `None` without a worker program.
    pub(super) loaded: Option<Result<ProbedLibraries, Problem>>,
}
