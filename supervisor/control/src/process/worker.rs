//! A worker process, from its start to its exit.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use shadowslice_shared::batch::IN_FLIGHT;
use shadowslice_shared::boot::{
    Assignment, BootRefusal, DeviceMemory, LoadedModel, WarmUp, WarmUpReport, WorkerPurpose, descriptors,
};
use shadowslice_shared::groups::Groups;
use shadowslice_shared::slab::{AnswerSlab, SlabError};
use shadowslice_shared::units::{Percent, Sms, ms};
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};

use super::boot::{self, Boot, FilesToLoad};
use super::exit::{EndWatch, Kill, Process, WorkerEnd};
use super::pid_files::PidFile;
use super::priority;
use super::reference::ReferenceFile;
use super::shared::SharedPlace;
use super::spawn::InheritedFile;
use super::start_queue::StartPermit;
use super::weights::KeptWeights;
use super::worker_host::{WorkerHost, join, pin_to_cores, start};
use crate::backend::{Grant, GrantError};
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
    #[error("cannot start a shared worker on the GPU")]
    Grant(#[source] GrantError),
    #[error("cannot pass the model to a shared worker; raise the limit on open files")]
    Join(#[source] io::Error),
}

impl SpawnError {
    pub(super) fn of_program(program: &Path, source: io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::NotFound => Self::NoProgram(program.to_owned()),
            _ => Self::Process { program: program.to_owned(), source },
        }
    }
}

#[derive(Debug)]
pub struct WorkerEvent {
    pub worker: WorkerId,
    pub said: WorkerSaid,
}

#[derive(Debug)]
pub enum WorkerSaid {
    /// The worker runs and uses this protocol version. Its main thread has this id.
    Connected {
        thread: i32,
    },
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
    Exited(WorkerEnd),
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
    /// The shared process that the worker joins. `None` for a process of its own.
    pub shared: Option<SharedPlace<'l>>,
    pub low_priority: bool,
    /// The permit to start, if workers wait in a queue.
    pub permit: Option<StartPermit>,
    pub events: mpsc::Sender<WorkerEvent>,
}

#[derive(Debug)]
pub struct Worker {
    pub id: WorkerId,
    pub pid: i32,
    /// True if the process also runs other models.
    pub is_member: bool,
    /// The thread of a member that loads the model and serves, after its hello.
    thread: Option<i32>,
    cpus: Vec<usize>,
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
    /// The device memory that the worker releases while the model sleeps, in bytes, or the reason why the
    /// model cannot sleep.
    pub sleep: Result<u64, String>,
    /// The number of pieces of the worker's largest batch, or the reason why its batches are not cut.
    pub pieces: Result<u32, String>,
    socket: Arc<BatchSocket>,
    slab: Option<AnswerSlab>,
    /// The sender for the order to load, until the order is sent.
    load_tx: Option<oneshot::Sender<()>>,
    kill_tx: mpsc::Sender<Kill>,
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
        let passed = [
            (descriptors::BOOT, their_boot.as_fd()),
            (descriptors::BATCHES, theirs.as_fd()),
            (descriptors::REQUESTS, launch.requests),
            (descriptors::RESPONSES, slab.as_fd()),
            (descriptors::REFERENCE, launch.reference.as_fd()),
        ];
        let weights_file = their_weights.as_ref().map(|file| (descriptors::WEIGHTS, file.as_fd()));
        let passed = passed.into_iter().chain(weights_file);
        let files = passed.map(|(number, file)| InheritedFile { number, file });
        let files: Vec<_> = files.chain(launch.grant.inherited()).collect();
        let spawned = Instant::now();
        let host = match &launch.shared {
            None => WorkerHost::Process(start(&launch, &files)?),
            Some(place) => join(&launch, place, &files)?,
        };
        drop((theirs, their_boot));
        let (pid, is_member) = (host.pid(), launch.shared.is_some());
        let (kill_tx, kill_rx) = mpsc::channel(1);
        let (load_tx, load_rx) = oneshot::channel();
        let worker = Self {
            id: launch.id,
            pid,
            is_member,
            thread: None,
            cpus: launch.cpus.to_owned(),
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
            sleep: Err("the worker is not warm".to_owned()),
            pieces: Err("the worker is not warm".to_owned()),
        };
        launch.attend(host, boot_socket, load_rx, kill_rx, plan);
        Ok(worker)
    }

    pub fn note(&mut self, said: &WorkerSaid) {
        let boot = &mut self.boot_ms;
        match said {
            WorkerSaid::Connected { thread } => {
                boot.spawn = ms(self.spawned.elapsed());
                // A worker could report a thread of another process.
                let thread = Some(*thread).filter(|thread| {
                    Path::new(&format!("/proc/{}/task/{thread}", self.pid)).try_exists().unwrap_or(false)
                });
                self.thread = thread.filter(|_| self.is_member);
                if let Some(thread) = self.thread {
                    pin_to_cores(thread, &self.cpus);
                }
            }
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
                self.sleep = warmed.sleep.clone();
                self.pieces = warmed.pieces.clone();
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
        if !std::mem::take(&mut self.lowered) {
            return;
        }
        match (self.thread, self.is_member) {
            (_, false) => priority::set(self.pid, priority::NORMAL),
            (Some(thread), true) => priority::set_thread(thread, priority::NORMAL),
            (None, true) => {}
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

    /// Kills the worker. On a GPU this is the last resort, because it interrupts a running kernel. If
    /// the worker runs in a shared process, this ends all workers of the process. A worker that has
    /// never served only loses its sockets at first.
    pub fn kill(&self) {
        let kill = if self.slab.is_some() { Kill::Starting } else { Kill::Serving };
        if self.is_member {
            self.socket.close();
        }
        // A full channel means that a kill is already in progress.
        self.kill_tx.try_send(kill).ok();
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

impl LaunchSpec<'_> {
    /// Starts the tasks that guide the worker's boot and wait for its end.
    fn attend(
        self,
        host: WorkerHost,
        socket: UnixStream,
        load_rx: oneshot::Receiver<()>,
        kill_rx: mpsc::Receiver<Kill>,
        plan: impl FnOnce(&LoadedModel) -> Result<WarmUp, BootRefusal> + Send + 'static,
    ) {
        let pid = host.pid();
        let (model, events) = (self.assignment.model.clone(), self.events.clone());
        let boot = Boot {
            socket,
            worker: self.id,
            pid,
            grant: Arc::clone(&self.grant),
            permit: self.permit,
            shared: host.shared().cloned(),
            occupied: self.grant.occupy(),
            files: self.files,
            events: self.events,
        };
        let boot = tokio::spawn(boot::run(boot, Box::new(self.assignment), load_rx, plan));
        let watch = EndWatch { worker: self.id, pid, boot, kill_rx, events };
        match host {
            WorkerHost::Process(child) => {
                let entry = PidFile::register(&self.settings.register, pid);
                let process = Process { name: model, child, pid, grant: self.grant, _entry: entry };
                tokio::spawn(watch.of_process(process));
            }
            WorkerHost::Shared { process, lifeline } => {
                tokio::spawn(watch.of_member(process, lifeline, self.grant));
            }
        }
    }
}
