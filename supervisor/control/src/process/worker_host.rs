//! The process for a worker: the start of a process of its own, or the entry into a shared one.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use nix::libc;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use rustix::process::{Resource, Rlimit, prlimit};
use shadowslice_shared::boot::EngineSpec;
use shadowslice_shared::members::{JoinRequest, LIFELINE};
use tokio::net::unix::pipe;

use super::environment::environment;
use super::priority;
use super::python::add_python;
use super::shared::{SharedPlace, SharedProcess};
use super::spawn::{Child, InheritedFile, spawn};
use super::stderr_forward;
use super::worker::{LaunchSpec, SpawnError};

/// The process in which a worker runs.
pub(super) enum WorkerHost {
    Process(Child),
    Shared { process: Arc<SharedProcess>, lifeline: pipe::Receiver },
}

impl WorkerHost {
    pub(super) fn shared(&self) -> Option<&Arc<SharedProcess>> {
        match self {
            Self::Process(_) => None,
            Self::Shared { process, .. } => Some(process),
        }
    }

    pub(super) fn pid(&self) -> i32 {
        match self {
            Self::Process(child) => child.pid(),
            Self::Shared { process, .. } => process.pid,
        }
    }
}

/// Adds the worker to its shared process.
pub(super) fn join(
    launch: &LaunchSpec<'_>,
    place: &SharedPlace<'_>,
    files: &[InheritedFile<'_>],
) -> Result<WorkerHost, SpawnError> {
    create_cache_folder(&launch.assignment.engine);
    let process = place.process(launch.settings)?;
    let (lifeline, theirs) = io::pipe().map_err(SpawnError::Pipe)?;
    let lifeline = pipe::Receiver::from_owned_fd(lifeline.into()).map_err(SpawnError::Pipe)?;
    let lifeline_file = InheritedFile { number: LIFELINE, file: theirs.as_fd() };
    let files: Vec<_> = files.iter().copied().chain([lifeline_file]).collect();
    let request = JoinRequest {
        model: launch.assignment.model.clone(),
        descriptors: files.iter().map(|file| file.number).collect(),
        low_priority: launch.low_priority,
    };
    process.join(request, &files.iter().map(|file| file.file).collect::<Vec<_>>())?;
    Ok(WorkerHost::Shared { process, lifeline })
}

/// Creates the folder in which the worker creates its own. If this fails, the worker caches nothing.
fn create_cache_folder(engine: &EngineSpec) {
    if let EngineSpec::OnnxRuntime { optimised: Some(folder), .. }
    | EngineSpec::Python { cache: Some(folder), .. } = engine
        && let Some(parent) = folder.parent()
    {
        std::fs::create_dir_all(parent).ok();
    }
}

pub(super) fn start(launch: &LaunchSpec<'_>, files: &[InheritedFile<'_>]) -> Result<Child, SpawnError> {
    let (said, saying) = stderr_forward::pipe().map_err(SpawnError::Pipe)?;
    let stderr = InheritedFile { number: libc::STDERR_FILENO, file: saying.as_fd() };
    let files: Vec<_> = files.iter().copied().chain([stderr]).collect();
    let engine = &launch.assignment.engine;
    create_cache_folder(engine);
    let mut environment = environment(&launch.grant, &launch.settings.variables);
    let user = launch.user.as_ref().map(|(user, home)| {
        // Programs read only the first variable of a name.
        environment.retain(|(name, _)| name != "HOME");
        environment.push(("HOME".into(), home.into()));
        user.to_string()
    });
    let (program, before): (_, &[&str]) = match engine {
        EngineSpec::Python { interpreter, threads, .. } => {
            add_python(&mut environment, &launch.settings.programs.python, *threads)?;
            (interpreter.as_path(), &["-m", "shadowslice.worker"])
        }
        EngineSpec::OnnxRuntime { .. } | EngineSpec::Emulated { .. } => {
            (&launch.settings.programs.worker, &[])
        }
    };
    let arguments: Vec<&str> = before.iter().copied().chain(["--boot"]).chain(user.as_deref()).collect();
    let child = spawn(program, &arguments, &environment, &files);
    let child = child.map_err(|source| SpawnError::of_program(program, source))?;
    let pid = child.pid();
    tokio::spawn(stderr_forward::forward(said, launch.assignment.model.clone(), pid));
    apply_limits(launch, pid);
    Ok(child)
}

/// Limits the worker's memory and sets its priority and cores. The worker's later threads inherit
/// these settings.
fn apply_limits(launch: &LaunchSpec<'_>, pid: i32) {
    if let (Some(memory), Some(process)) = (launch.settings.memory, rustix::process::Pid::from_raw(pid)) {
        let limit = Rlimit { current: Some(memory), maximum: Some(memory) };
        if let Err(error) = prlimit(Some(process), Resource::Data, limit) {
            tracing::warn!(model = launch.assignment.model, pid, memory, %error, "cannot limit a worker's memory, so the worker runs without a limit; raise the hard limit on data (LimitDATA), or remove `workers.memory`");
        }
    }
    if launch.low_priority {
        priority::set(pid, priority::LOWEST);
    }
    pin_to_cores(pid, launch.cpus);
}

/// Pins a thread, or a new process, to these cores. An empty list means all cores.
pub(super) fn pin_to_cores(thread: i32, cpus: &[usize]) {
    if cpus.is_empty() {
        return;
    }
    let mut set = CpuSet::new();
    let pinned = cpus.iter().try_for_each(|&cpu| set.set(cpu));
    if let Err(error) = pinned.and_then(|()| sched_setaffinity(Pid::from_raw(thread), &set)) {
        tracing::warn!(
            thread, ?cpus, %error,
            "cannot pin a worker to its CPU cores; the worker can run on any core; correct the model's `cpus`"
        );
    }
}
