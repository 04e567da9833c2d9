//! The checks and set-up of the host before the supervisor serves: GPUs, programs and limits.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use nix::sys::resource::{Resource, getrlimit, setrlimit};
use procfs::process::Process;
use procfs::{Current, ProcessCGroup};
use shadowslice_config as config;
use shadowslice_shared::slab::SlabError;
use shadowslice_shared::units::Sms;
use tokio::runtime::{Builder, Runtime};

use crate::backend::{
    self, CommandError, EmulatedBackend, GpuBackend, Gpus, Limits, MpsError, MpsGpu, MpsHandover, MpsSetup,
    ProbeRunError, ProbedLibraries, WholeGpu,
};
use crate::nvml::{Driver, NvmlFault, NvmlLibrary};
use crate::process::Programs;
pub use crate::run_dir::{RunDir, RunDirError, unsafe_because};
use shadowslice_config::{Config, CudaDevice, EngineConfig, GpuConfig, ModelConfig, Partitioning};
use shadowslice_shared::errors;

#[derive(Debug, thiserror::Error)]
pub enum HostError {
    #[error(
        "GPU {device} not found; to try without a GPU, use an emulated device: `device: emulated, sms: 132`, or `--device emulated`"
    )]
    NoDriver {
        device: String,
        #[source]
        source: NvmlFault,
    },
    #[error(
        "`{device}` matches {found} GPUs; use a UUID (`nvidia-smi -L`); \
         to try without a GPU, use an emulated device: `device: emulated, sms: 132`, or `--device emulated`"
    )]
    NoGpu { device: String, found: usize },
    #[error(
        "GPU {device} is the same as GPU {other} of this configuration; list the GPU once, and let models share it"
    )]
    SameGpu { device: String, other: String },
    #[error(
        "cannot use GPU {device}; to try without a GPU, use an emulated device: `device: emulated, sms: 132`, or `--device emulated`"
    )]
    Cuda {
        device: String,
        #[source]
        source: ProbeRunError,
    },
    #[error("cannot share GPU {device} through MPS")]
    Mps {
        device: String,
        #[source]
        source: MpsError,
    },
    #[error("cannot start the runtime; raise the limit on processes")]
    Runtime(#[source] io::Error),
    #[error("cannot create an emulated GPU")]
    Emulated(#[source] SlabError),
    #[error(
        "cannot find ONNX Runtime's library (looked for {0}); set `onnxruntime: {{library: PATH}}` or ORT_DYLIB_PATH, or run `make onnxruntime`"
    )]
    NoOnnxRuntime(String),
    #[error(
        "cannot find out which libraries the worker can load; install both programs from one build, or run `shadowslice-worker --probe libraries` to see why"
    )]
    Libraries(#[source] ProbeRunError),
    #[error(
        "cannot check a Python model with its interpreter; correct the interpreter's path, or, after a timeout, the import of the model"
    )]
    Interpreter(#[source] CommandError),
    #[error("cannot create a temporary folder; set TMPDIR to a writable folder")]
    Temporary(#[source] io::Error),
    #[error("cannot find the folder of the supervisor's program, which also contains the worker's program")]
    Executable(#[source] io::Error),
    #[error("worker not found at {0}; install shadowslice-worker in the folder of shadowslice")]
    NoWorker(PathBuf),
    #[error(transparent)]
    RunDir(#[from] RunDirError),
}

/// Finds the configured GPUs. A GPU under MPS gets a daemon with directories in `private`, or takes
/// over the daemon of one of the `handovers`. The daemon ends when the GPU is dropped. `probe` is
/// the program that reports what a CUDA process finds.
pub fn gpus(
    gpus: &[GpuConfig],
    private: &Path,
    probe: &Path,
    several_users: bool,
    handovers: &[MpsHandover],
) -> Result<Gpus, HostError> {
    let mut known = Vec::new();
    let make = |(index, gpu): (usize, &GpuConfig)| -> Result<Arc<dyn GpuBackend>, HostError> {
        Ok(match gpu {
            GpuConfig::Emulated { sms, .. } => {
                Arc::new(EmulatedBackend::new(*sms).map_err(HostError::Emulated)?)
            }
            GpuConfig::Cuda { device, partition, .. } => {
                let (name, uuid) = identify(device)?;
                only_once(&mut known, &name, &uuid)?;
                match partition {
                    Partitioning::None => Arc::new(whole_gpu(name, uuid, private, probe)?),
                    Partitioning::Mps => {
                        let handover = handovers.iter().find(|handover| handover.uuid == uuid).cloned();
                        let setup = MpsSetup {
                            device: name.clone(),
                            index,
                            uuid,
                            program: backend::control_program(),
                            probe: probe.to_owned(),
                            private: private.to_owned(),
                            several_users,
                            handover,
                            limits: Limits::default(),
                        };
                        let started = MpsGpu::start(setup);
                        Arc::new(started.map_err(|source| HostError::Mps { device: name, source })?)
                    }
                }
            }
        })
    };
    gpus.iter().enumerate().map(make).collect()
}

/// Refuses a GPU that is already listed. An index and a UUID, or two spellings of a UUID, can mean
/// the same GPU, whose shares would then be assigned twice.
fn only_once(known: &mut Vec<(String, String)>, device: &str, uuid: &str) -> Result<(), HostError> {
    if let Some((other, _)) = known.iter().find(|(_, known)| known.eq_ignore_ascii_case(uuid)) {
        return Err(HostError::SameGpu { device: device.to_owned(), other: other.clone() });
    }
    known.push((device.to_owned(), uuid.to_owned()));
    Ok(())
}

/// The length of a whole UUID: `GPU-` and 36 characters.
const WHOLE_UUID: usize = 40;

/// Returns the configured name and the UUID of a GPU. A whole UUID needs no NVML.
fn identify(device: &CudaDevice) -> Result<(String, String), HostError> {
    let name = device.to_string();
    let known = match NvmlLibrary::open().and_then(|nvml| nvml.identities()) {
        Ok(known) => known,
        Err(_) if name.len() == WHOLE_UUID => return Ok((name.clone(), name)),
        Err(source) => return Err(HostError::NoDriver { device: name, source }),
    };
    let mut matches = known.into_iter().filter(|gpu| gpu.is(device));
    match (matches.next(), matches.count()) {
        (Some(gpu), 0) => Ok((name, gpu.uuid)),
        (first, more) => Err(HostError::NoGpu { device: name, found: usize::from(first.is_some()) + more }),
    }
}

fn whole_gpu(device: String, uuid: String, private: &Path, probe: &Path) -> Result<WholeGpu, HostError> {
    let no_pipe = private.join("no-mps");
    let surroundings = WholeGpu::surroundings(&uuid, &no_pipe);
    match runtime()?.block_on(backend::probe(probe, &surroundings)) {
        Ok(found) => Ok(WholeGpu::new(device, uuid, Sms(found.sms), no_pipe)),
        Err(source) => Err(HostError::Cuda { device, source }),
    }
}

fn runtime() -> Result<Runtime, HostError> {
    Builder::new_current_thread().enable_all().build().map_err(HostError::Runtime)
}

/// Returns the path of ONNX Runtime's library, or an empty path if no model needs it.
pub fn onnxruntime_library(config: &Config) -> Result<PathBuf, HostError> {
    let needed = config.models.iter().any(|model| matches!(model.engine, EngineConfig::OnnxRuntime { .. }));
    if needed { find_onnxruntime(config.onnxruntime.library.as_deref()) } else { Ok(PathBuf::new()) }
}

/// Returns the path of ONNX Runtime's library: the configured one, the one in the environment, or
/// one where `make` and packages install it.
pub fn find_onnxruntime(configured: Option<&Path>) -> Result<PathBuf, HostError> {
    let from_environment = || std::env::var_os("ORT_DYLIB_PATH").map(PathBuf::from);
    let places = match configured.map(Path::to_owned).or_else(from_environment) {
        Some(named) => vec![named],
        None => beside_executable()?,
    };
    let found = places.iter().find(|place| place.is_file()).cloned();
    found.ok_or_else(|| {
        let looked: Vec<_> = places.iter().map(|place| place.display().to_string()).collect();
        HostError::NoOnnxRuntime(looked.join(", "))
    })
}

/// Returns the fault of a Python model, if any. A separate process checks the model.
pub fn fault_of(model: &ModelConfig) -> Option<String> {
    let EngineConfig::Python { path, interpreter, .. } = &model.engine else { return None };
    let tried = programs().and_then(|programs| {
        let temporary = tempfile::tempdir().map_err(HostError::Temporary)?;
        let tried = backend::python_fault(interpreter, &programs.python, path, temporary.path());
        runtime()?.block_on(tried).map_err(HostError::Interpreter)
    });
    // If the interpreter hangs or is another program, the error does not concern the model's file.
    let fault = tried.unwrap_or_else(|error| Some(errors::chain(&error)))?;
    let path = path.to_string_lossy();
    Some(if fault.contains(&*path) { fault } else { format!("{path}: {fault}") })
}

/// Returns the libraries that `worker` can load. A separate process tries to load them.
pub fn libraries(worker: &Path, onnxruntime: Option<&Path>) -> Result<ProbedLibraries, HostError> {
    runtime()?.block_on(backend::libraries(worker, onnxruntime)).map_err(HostError::Libraries)
}

fn beside_executable() -> Result<Vec<PathBuf>, HostError> {
    let name = "libonnxruntime.so";
    let beside = executable_dir()?;
    let above = beside.parent().unwrap_or(&beside).to_owned();
    let folders = [above.join("onnxruntime"), above.join("lib/shadowslice"), above.join("lib"), beside];
    Ok(folders.map(|folder| folder.join(name)).into())
}

pub fn worker_program() -> Result<PathBuf, HostError> {
    let program = executable_dir()?.join("shadowslice-worker");
    if program.is_file() { Ok(program) } else { Err(HostError::NoWorker(program)) }
}

/// Returns the programs that run as workers. The package for Python models is next to the binary,
/// or where packages install it. It is checked only when a model needs it.
pub fn programs() -> Result<Programs, HostError> {
    let beside = executable_dir()?;
    let packaged = beside.join("../lib/shadowslice/python");
    let python = if packaged.is_dir() { packaged } else { beside.join("python") };
    Ok(Programs { worker: worker_program()?, python })
}

fn executable_dir() -> Result<PathBuf, HostError> {
    let executable = std::env::current_exe().map_err(HostError::Executable)?;
    Ok(executable.parent().map_or_else(PathBuf::new, Path::to_owned))
}

/// Returns the number of threads that serve clients: half of the cores, and at most eight. The
/// other half is for the workers.
pub fn data_path_threads() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| (cores.get() / 2).clamp(1, 8))
}

/// Raises the limit on open files, because connections and workers need descriptors.
pub fn raise_file_limit() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        tracing::warn!(
            %error,
            "cannot raise the soft limit on open files to the hard limit; the supervisor may accept fewer connections"
        );
    }
}

/// Returns the number of connections to accept: the configured number, or fewer if the limit on
/// open files is low. Workers and commands need descriptors too. Otherwise, clients could prevent
/// the restart of a worker.
pub fn connections(config: &Config) -> usize {
    if let Some(why) = connections_warning(config) {
        tracing::warn!(why, "accepting fewer connections than limits.connections");
    }
    let (configured, own) = (config.limits.connections, config.own_descriptors());
    getrlimit(Resource::RLIMIT_NOFILE).map_or(configured, |(limit, _)| affordable(configured, own, limit))
}

/// Returns a warning if the limit on open files is too low for `limits.connections`. A start with
/// the limits of this process would find the same.
pub fn connections_warning(config: &Config) -> Option<String> {
    let configured = config.limits.connections;
    // At the start, the supervisor raises the soft limit to the hard limit.
    let (_, open_files) = getrlimit(Resource::RLIMIT_NOFILE).ok()?;
    let own = config.own_descriptors();
    let taken = affordable(configured, own, open_files);
    (taken < configured).then(|| {
        format!(
            "the limit on open files, {open_files} (ulimit -Hn), leaves {taken} of {configured} connections \
             (limits.connections): workers and commands may need {own}; raise it to {} (LimitNOFILE)",
            own.saturating_add(configured as u64)
        )
    })
}

/// Returns `limits.memory`, or a quarter of the memory that the host and the cgroup permit. The
/// result is at least the memory for two of the largest requests.
pub fn request_memory(limits: &config::LimitsConfig) -> u64 {
    const PART: u64 = 4;
    if let Some(memory) = limits.memory {
        return memory;
    }
    let host = procfs::Meminfo::current().map_or(u64::MAX, |meminfo| meminfo.mem_total);
    let of_cgroup = |cgroup: &ProcessCGroup| {
        let folder = Path::new("/sys/fs/cgroup").join(cgroup.pathname.trim_start_matches('/'));
        std::fs::read_to_string(folder.join("memory.max")).ok()?.trim().parse().ok()
    };
    let cgroups = Process::myself().and_then(|own| own.cgroups());
    let cgroup =
        cgroups.ok().and_then(|own| own.0.iter().filter(|own| own.hierarchy == 0).find_map(of_cgroup));
    let least = config::LimitsConfig::least_memory(limits.request_bytes, limits.response_bytes);
    (host.min(cgroup.unwrap_or(u64::MAX)) / PART).max(least)
}

/// Returns `workers.host_memory`, or half of the host's memory.
pub fn pinned_memory(workers: &config::WorkersConfig) -> u64 {
    let half = || procfs::Meminfo::current().map_or(0, |meminfo| meminfo.mem_total / 2);
    workers.host_memory.unwrap_or_else(half)
}

fn affordable(configured: usize, own: u64, open_files: u64) -> usize {
    let left = open_files.saturating_sub(own).max(1);
    usize::try_from(left).map_or(configured, |left| configured.min(left))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_is_taken_once_whatever_it_is_called() {
        let mut known = Vec::new();
        assert!(only_once(&mut known, "0", "GPU-5a7c").is_ok());
        assert!(only_once(&mut known, "1", "GPU-5a7d").is_ok());
        for device in ["GPU-5a7c", "GPU-5A7C"] {
            let fault = only_once(&mut known, device, device).unwrap_err();
            assert!(fault.to_string().contains("the same as GPU 0"), "{fault}");
        }
    }

    #[test]
    fn connections_leave_descriptors_for_workers_and_commands() {
        assert_eq!(affordable(16384, 120, 1 << 20), 16384);
        assert_eq!(affordable(16384, 120, 1024), 1024 - 120);
        assert_eq!(affordable(16384, 120, 100), 1, "at least one connection");
        assert_eq!(affordable(16384, 120, u64::MAX), 16384);
    }
}
