//! A worker process, from its start to its exit.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::libc;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use rustix::process::{Resource, Rlimit, prlimit};
use serde::{Deserialize, Serialize};
use shadowslice_shared::batch::IN_FLIGHT;
use shadowslice_shared::boot::{
    Assignment, BootRefusal, DeviceMemory, EngineSpec, LoadedModel, WarmUp, WarmUpReport, WorkerPurpose,
    descriptors,
};
use shadowslice_shared::groups::Groups;
use shadowslice_shared::slab::{AnswerSlab, SlabError};
use shadowslice_shared::units::{Percent, Sms, ms};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

use super::boot::{self, Boot, FilesToLoad};
use super::environment::environment;
use super::pid_files::PidFile;
use super::priority;
use super::python::add_python;
use super::reference::ReferenceFile;
use super::spawn::{Child, InheritedFile, spawn};
use super::start_queue::StartPermit;
use super::stderr_forward;
use super::weights::KeptWeights;
use crate::backend::Grant;
use shadowslice_datapath::pipeline::BatchSocket;
use shadowslice_shared::ids::WorkerId;

#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    #[error("cannot create a socket pair; raise the limit on open files")]
    Socket(#[source] io::Error),
    #[error("cannot create the shared memory for the worker's responses")]
    Slab(#[source] SlabError),
    #[error("{0} not found; install the worker's program in the folder of the supervisor's program")]
    NoProgram(PathBuf),
    #[error("{0} not found; install the Python package `shadowslice` next to the supervisor's program")]
    NoPackage(PathBuf),
    #[error("cannot create a pipe; raise the limit on open files")]
    Pipe(#[source] io::Error),
    #[error("cannot start {program}")]
    Process {
        program: PathBuf,
        #[source]
        source: io::Error,
    },
}

#[derive(Debug)]
pub struct WorkerEvent {
    pub worker: WorkerId,
    pub said: WorkerSaid,
}

#[derive(Debug)]
pub enum WorkerSaid {
    /// The worker runs and uses this protocol version.
    Connected,
    Loaded(LoadedModel),
    /// The worker warms up batches of `rows` rows.
    Warming {
        rows: u32,
    },
    /// The worker can serve, or the reference worker has written its answers.
    Warmed(WarmUpReport),
    Refused(BootRefusal),
    /// The boot channel broke before the worker was warm.
    Lost(String),
    /// The worker has exited, and its resources are free.
    Exited(io::Result<ExitStatus>),
}

/// The settings that all workers share.
#[derive(Debug, Clone)]
pub struct WorkerSettings {
    pub programs: Programs,
    /// The names of the supervisor's variables that workers get in addition to the usual ones.
    pub variables: Vec<String>,
    /// The limit of a worker's private writable memory on the host in bytes. `None` means no limit.
    pub memory: Option<u64>,
    /// The folder with a file for each running worker.
    pub register: PathBuf,
    /// The runtime that reads the answers of workers.
    pub data_path: tokio::runtime::Handle,
}

/// The programs that run as workers.
#[derive(Debug, Clone)]
pub struct Programs {
    pub worker: PathBuf,
    /// The folder of the package with which a Python interpreter runs as a worker.
    pub python: PathBuf,
}

#[derive(Debug)]
pub struct LaunchSpec<'l> {
    pub id: WorkerId,
    pub settings: &'l WorkerSettings,
    pub assignment: Assignment,
    pub grant: Arc<Grant>,
    pub share: Percent,
    /// The slab that will contain its requests.
    pub requests: BorrowedFd<'l>,
    pub reference: &'l ReferenceFile,
    pub weights: &'l KeptWeights,
    /// The cores to which the worker is pinned, or empty for all cores.
    pub cpus: &'l [usize],
    /// The files that the worker must load, if the model has served.
    pub files: Option<FilesToLoad>,
    /// The user of the worker and a folder of that user, or `None` for the supervisor's user.
    pub user: Option<(u32, PathBuf)>,
    pub low_priority: bool,
    /// The permit to start, if workers wait in a queue.
    pub permit: Option<StartPermit>,
    pub events: mpsc::Sender<WorkerEvent>,
}

#[derive(Debug)]
pub struct Worker {
    pub id: WorkerId,
    pub pid: i32,
    pub purpose: WorkerPurpose,
    pub share: Percent,
    pub sms: Sms,
    /// The partition with which the worker begins, if its share is a partition inside the process.
    pub groups: Option<Groups>,
    /// The socket for the weights that the worker allocates on the GPU, if it exists.
    pub weights: Option<OwnedFd>,
    pub boot_ms: BootMs,
    /// The largest difference from the reference answers relative to the largest value, once warm.
    pub answer_error: Option<f64>,
    /// The model as this worker loaded it.
    pub loaded: Option<LoadedModel>,
    /// The number of rows that the worker warms up now, and the start of the warm-up.
    pub warming: Option<(u32, Instant)>,
    /// The device memory of the worker by kind, once warm.
    pub memory: Option<DeviceMemory>,
    socket: Arc<BatchSocket>,
    slab: Option<AnswerSlab>,
    /// The sender for the order to load, until the order is sent.
    load_tx: Option<oneshot::Sender<()>>,
    kill_tx: mpsc::Sender<()>,
    lowered: bool,
    spawned: Instant,
    /// The number of times that the main thread had been scheduled at the last check, if the
    /// process was stopped.
    stopped: Option<u64>,
}

/// The durations of the parts of a worker's start, in ms. A duration is zero if the worker has not
/// reached this part, or if its device does not have it.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct BootMs {
    /// The time from the start of the process to its hello.
    pub spawn: f64,
    pub libraries: f64,
    pub context: f64,
    pub session: f64,
    /// The time for the first run of every batch size.
    pub warmup: f64,
    /// The time for the second run, which compares the answers.
    pub proof: f64,
}

impl Worker {
    /// Starts a worker, which says hello and then waits for [`Worker::warm`]. `plan` returns the
    /// warm-up for the loaded model. The worker reports events until [`WorkerSaid::Exited`].
    pub fn spawn(
        launch: LaunchSpec<'_>,
        plan: impl FnOnce(&LoadedModel) -> Result<WarmUp, BootRefusal> + Send + 'static,
    ) -> Result<Self, SpawnError> {
        let (boot_socket, their_boot) = boot::pair().map_err(SpawnError::Socket)?;
        let (socket, theirs) = {
            let _reactor = launch.settings.data_path.enter();
            BatchSocket::pair().map_err(SpawnError::Socket)?
        };
        let slab_bytes = launch.assignment.response_slot_bytes * IN_FLIGHT as u64;
        let slab_name = format!("shadowslice-{}-responses", launch.assignment.model);
        let slab = AnswerSlab::create(&slab_name, slab_bytes).map_err(SpawnError::Slab)?;
        let (weights, their_weights) = offered_weights(&launch).unzip();
        let (said, saying) = stderr_forward::pipe().map_err(SpawnError::Pipe)?;
        let passed = [
            (descriptors::BOOT, their_boot.as_fd()),
            (descriptors::BATCHES, theirs.as_fd()),
            (descriptors::REQUESTS, launch.requests),
            (descriptors::RESPONSES, slab.as_fd()),
            (descriptors::REFERENCE, launch.reference.as_fd()),
            (libc::STDERR_FILENO, saying.as_fd()),
        ];
        let weights_file = their_weights.as_ref().map(|file| (descriptors::WEIGHTS, file.as_fd()));
        let passed = passed.into_iter().chain(weights_file);
        let files = passed.map(|(number, file)| InheritedFile { number, file });
        let spawned = Instant::now();
        let child = start(&launch, &files.chain(launch.grant.inherited()).collect::<Vec<_>>())?;
        drop((theirs, their_boot, saying));
        let pid = child.pid();
        tokio::spawn(stderr_forward::forward(said, launch.assignment.model.clone(), pid));
        apply_limits(&launch, pid);
        let (kill_tx, kill_rx) = mpsc::channel(1);
        let (load_tx, load_rx) = oneshot::channel();
        let worker = Self {
            id: launch.id,
            pid,
            purpose: launch.assignment.purpose,
            share: launch.share,
            sms: launch.grant.sms(),
            groups: launch.assignment.partition.as_ref().map(|partition| partition.groups),
            socket: Arc::new(socket),
            slab: Some(slab),
            load_tx: Some(load_tx),
            kill_tx,
            weights,
            lowered: launch.low_priority,
            spawned,
            stopped: None,
            boot_ms: BootMs::default(),
            answer_error: None,
            loaded: None,
            warming: None,
            memory: None,
        };
        launch.attend(child, boot_socket, load_rx, kill_rx, plan);
        Ok(worker)
    }

    pub fn note(&mut self, said: &WorkerSaid) {
        let boot = &mut self.boot_ms;
        match said {
            WorkerSaid::Connected => boot.spawn = ms(self.spawned.elapsed()),
            WorkerSaid::Loaded(loaded @ LoadedModel { took, .. }) => {
                self.loaded = Some(loaded.clone());
                boot.libraries = ms(took.libraries);
                boot.context = ms(took.context);
                boot.session = ms(took.session);
            }
            WorkerSaid::Warming { rows } => {
                let since = self.warming.map_or_else(Instant::now, |(_, since)| since);
                self.warming = Some((*rows, since));
            }
            WorkerSaid::Warmed(warmed) => {
                self.warming = None;
                (boot.warmup, boot.proof) = (ms(warmed.warmup), ms(warmed.proof));
                self.memory = Some(warmed.memory);
                self.answer_error = warmed.times.iter().map(|size| size.error).reduce(f64::max);
            }
            WorkerSaid::Refused(_) => self.warming = None,
            WorkerSaid::Lost(_) | WorkerSaid::Exited(_) => {}
        }
    }

    /// Lets the worker load its model and warm up. Call this after its hello.
    pub fn warm(&mut self) {
        if let Some(load_tx) = self.load_tx.take() {
            // The receiver is gone only if the worker exits, which is reported separately.
            load_tx.send(()).ok();
        }
    }

    /// Returns the socket and slab for the worker's lane, or `None` at the second call.
    pub fn lane(&mut self) -> Option<(Arc<BatchSocket>, AnswerSlab)> {
        Some((Arc::clone(&self.socket), self.slab.take()?))
    }

    /// Raises the CPU priority to that of serving workers.
    pub fn serve(&mut self) {
        if std::mem::take(&mut self.lowered) {
            priority::set(self.pid, priority::NORMAL);
        }
    }

    /// Lets the worker finish its batch and exit. A worker that waits for its order to load exits
    /// immediately.
    pub fn stop(&mut self) {
        self.load_tx = None;
        self.socket.close();
    }

    /// Returns true if a signal has kept the process stopped since the last call of this function.
    pub fn has_stood_still(&mut self) -> bool {
        let now = schedule_count_if_stopped(self.pid).ok().flatten();
        let then = std::mem::replace(&mut self.stopped, now);
        now.is_some() && now == then
    }

    /// Kills the worker. On a GPU this is the last resort, because it interrupts a running kernel.
    pub fn kill(&self) {
        // A full channel means that a kill is already in progress.
        self.kill_tx.try_send(()).ok();
    }
}

/// Returns the number of times that the main thread has been scheduled, if the process is stopped.
fn schedule_count_if_stopped(pid: i32) -> procfs::ProcResult<Option<u64>> {
    let process = procfs::process::Process::new(pid)?;
    if process.stat()?.state != 'T' {
        return Ok(None);
    }
    let status = process.status()?;
    let times = [status.voluntary_ctxt_switches, status.nonvoluntary_ctxt_switches];
    Ok(Some(times.into_iter().flatten().sum()))
}

/// Returns both ends of the socket for the weights. Without it, the worker loads its own copy of the
/// weights and serves.
fn offered_weights(launch: &LaunchSpec<'_>) -> Option<(OwnedFd, OwnedFd)> {
    if launch.assignment.purpose != WorkerPurpose::Serve {
        return None;
    }
    let unoffered = |error: &io::Error| {
        tracing::warn!(
            model = launch.assignment.model,
            %error,
            "cannot share the model's weights with a new worker; the worker loads a copy, which takes more GPU memory"
        );
    };
    launch.weights.offer().inspect_err(unoffered).ok()
}

fn start(launch: &LaunchSpec<'_>, files: &[InheritedFile<'_>]) -> Result<Child, SpawnError> {
    let engine = &launch.assignment.engine;
    if let EngineSpec::OnnxRuntime { optimised: Some(folder), .. }
    | EngineSpec::Python { cache: Some(folder), .. } = engine
        && let Some(parent) = folder.parent()
    {
        // The worker creates its own folder in this one. If this fails, the worker caches nothing.
        std::fs::create_dir_all(parent).ok();
    }
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
    spawn(program, &arguments, &environment, files).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => SpawnError::NoProgram(program.to_owned()),
        _ => SpawnError::Process { program: program.to_owned(), source },
    })
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
    if launch.cpus.is_empty() {
        return;
    }
    let mut set = CpuSet::new();
    let pinned = launch.cpus.iter().try_for_each(|&cpu| set.set(cpu));
    if let Err(error) = pinned.and_then(|()| sched_setaffinity(Pid::from_raw(pid), &set)) {
        tracing::warn!(
            model = launch.assignment.model, pid, cpus = ?launch.cpus, %error,
            "cannot pin a worker to its CPU cores; the worker can run on any core; correct the model's `cpus`"
        );
    }
}

/// The time within which a boot must notice that its worker has exited.
const BOOT_END_TIMEOUT: Duration = Duration::from_secs(1);

impl LaunchSpec<'_> {
    /// Starts the tasks that guide the worker's boot and wait for its exit.
    fn attend(
        self,
        child: Child,
        socket: UnixStream,
        load_rx: oneshot::Receiver<()>,
        kill_rx: mpsc::Receiver<()>,
        plan: impl FnOnce(&LoadedModel) -> Result<WarmUp, BootRefusal> + Send + 'static,
    ) {
        let pid = child.pid();
        let unregistered = |error: &_| {
            tracing::warn!(
                pid,
                %error,
                "cannot record a worker in the run directory; if the supervisor is killed, its next start cannot kill this worker"
            );
        };
        let entry = PidFile::write(&self.settings.register, pid).inspect_err(unregistered).ok();
        let (model, events) = (self.assignment.model.clone(), self.events.clone());
        let boot = Boot {
            socket,
            worker: self.id,
            pid,
            grant: Arc::clone(&self.grant),
            permit: self.permit,
            occupied: self.grant.occupy(),
            files: self.files,
            events: self.events,
        };
        let boot = tokio::spawn(boot::run(boot, Box::new(self.assignment), load_rx, plan));
        let process = Process { model, child, pid, grant: self.grant, _entry: entry };
        tokio::spawn(watch(process, kill_rx, boot, (self.id, events)));
    }
}

struct Process {
    model: String,
    child: Child,
    pid: i32,
    grant: Arc<Grant>,
    _entry: Option<PidFile>,
}

impl Process {
    /// Waits for the exit. Kills the process on request, or when it has lost its GPU context.
    async fn wait_exit(&mut self, kill_rx: &mut mpsc::Receiver<()>) -> io::Result<ExitStatus> {
        tokio::select! {
            status = self.child.wait() => return status,
            Some(()) = kill_rx.recv() => {}
            () = self.grant.lost() => {
                let (model, pid) = (&self.model, self.pid);
                tracing::warn!(model, pid, "killing and replacing a worker that lost its GPU context");
                return self.kill().await;
            }
        }
        // Interrupting a kernel could break all other workers on the GPU.
        if let Some(terminated) = self.grant.terminate(self.pid) {
            tokio::select! {
                status = self.child.wait() => return status,
                () = terminated => {}
            }
        }
        self.kill().await
    }

    async fn kill(&mut self) -> io::Result<ExitStatus> {
        self.child.kill()?;
        self.child.wait().await
    }
}

async fn watch(
    mut process: Process,
    mut kill_rx: mpsc::Receiver<()>,
    mut boot: JoinHandle<()>,
    (worker, events): (WorkerId, mpsc::Sender<WorkerEvent>),
) {
    let status = process.wait_exit(&mut kill_rx).await;
    process.grant.give_back(process.pid);
    // The exit is reported after the last event of the boot, which the exit ends.
    if tokio::time::timeout(BOOT_END_TIMEOUT, &mut boot).await.is_err() {
        tracing::warn!(
            pid = process.pid,
            "aborting the start task of an exited worker, because the task hangs, which is a bug in shadowslice; please report it with the log"
        );
        boot.abort();
    }
    // The controller ends only with the supervisor.
    events.send(WorkerEvent { worker, said: WorkerSaid::Exited(status) }).await.ok();
}
