//! Shared workers: processes in which several models have their workers.
//!
//! The first worker of a name starts the process. Further workers join it. After its last worker has
//! ended, the process exits.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::ExitStatus;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use nix::libc;
use parking_lot::Mutex;
use shadowslice_config::MAX_MEMBERS;
use shadowslice_shared::boot::WorkerPurpose;
use shadowslice_shared::contention::ClientPriority;
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::members::{JoinRequest, MEMBERS, MembersCommand, SharedSetup};
use shadowslice_shared::passing;
use shadowslice_shared::units::Percent;
use tokio::sync::{mpsc, watch};
use tokio_util::task::TaskTracker;

use super::environment::environment;
use super::exit::{EndCause, Process, WorkerEnd};
use super::pid_files::PidFile;
use super::spawn::{InheritedFile, spawn};
use super::stderr_forward;
use super::worker::{SpawnError, WorkerSettings};
use crate::backend::{GpuBackend, Grant, GrantRequest};

/// The time within which a process without workers must exit.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);

/// The properties that all workers of a shared process have in common.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct SharedKey {
    /// The name in the configuration (`worker`).
    pub name: String,
    /// The index of the GPU.
    pub gpu: usize,
    /// The priority under MPS, which is that of the whole process.
    pub priority: ClientPriority,
}

/// The running shared processes of the host.
#[derive(Debug, Default)]
pub struct SharedProcesses {
    by_key: Mutex<BTreeMap<SharedKey, Vec<Weak<SharedProcess>>>>,
    /// The tasks that wait for the exits of the processes.
    exits: TaskTracker,
}

impl SharedProcesses {
    /// Waits until all processes have exited. They exit after their last workers.
    pub async fn ended(&self) {
        self.exits.close();
        self.exits.wait().await;
    }
}

/// The shared process that a worker should join.
#[derive(Debug)]
pub struct SharedPlace<'p> {
    pub processes: &'p SharedProcesses,
    pub key: SharedKey,
    pub gpu: &'p Arc<dyn GpuBackend>,
    pub setup: SharedSetup,
    pub user: Option<u32>,
    /// A process that the worker must not join, because it has to survive the end of that process.
    pub not: Option<i32>,
}

/// A running shared process.
#[derive(Debug)]
pub(super) struct SharedProcess {
    pub(super) pid: i32,
    socket: OwnedFd,
    kill_tx: mpsc::Sender<WorkerId>,
    end_rx: watch::Receiver<Option<ProcessEnd>>,
    /// True if further workers must start another process.
    is_closed: AtomicBool,
}

#[derive(Debug, Clone)]
struct ProcessEnd {
    /// The exit status, or the reason why it is unknown.
    status: Result<ExitStatus, String>,
    cause: EndCause,
}

impl SharedPlace<'_> {
    /// Returns the process, which starts if it does not run yet.
    pub(super) fn process(&self, settings: &WorkerSettings) -> Result<Arc<SharedProcess>, SpawnError> {
        let mut all = self.processes.by_key.lock();
        let processes = all.entry(self.key.clone()).or_default();
        processes.retain(|process| process.strong_count() > 0);
        let usable = |process: &Arc<SharedProcess>| {
            Some(process.pid) != self.not
                && process.end_rx.borrow().is_none()
                && !process.is_closed.load(Ordering::Relaxed)
                && Arc::strong_count(process) <= MAX_MEMBERS
        };
        if let Some(process) = processes.iter().filter_map(Weak::upgrade).find(usable) {
            return Ok(process);
        }
        let process = Arc::new(self.start(settings)?);
        processes.push(Arc::downgrade(&process));
        Ok(process)
    }

    fn start(&self, settings: &WorkerSettings) -> Result<SharedProcess, SpawnError> {
        let priority = self.key.priority as u32 + 1;
        let wanted =
            GrantRequest { share: Percent::WHOLE, priority, memory_limit: None, room: None, joins: false };
        let grant = Grant::of(self.gpu, wanted, WorkerPurpose::Serve).map_err(SpawnError::Grant)?;
        let grant = Arc::new(grant);
        let (socket, theirs) = passing::socket_pair().map_err(SpawnError::Socket)?;
        let (said, saying) = stderr_forward::pipe().map_err(SpawnError::Pipe)?;
        let files = [(MEMBERS, theirs.as_fd()), (libc::STDERR_FILENO, saying.as_fd())];
        let files = files.map(|(number, file)| InheritedFile { number, file });
        let program = &settings.programs.worker;
        let user = self.user.map(|user| user.to_string());
        let arguments: Vec<&str> = ["--shared"].into_iter().chain(user.as_deref()).collect();
        let child = spawn(program, &arguments, &environment(&grant, &settings.variables), &files);
        let child = child.map_err(|source| SpawnError::of_program(program, source))?;
        let (pid, name) = (child.pid(), self.key.name.clone());
        tokio::spawn(stderr_forward::forward(said, name.clone(), pid));
        tracing::info!(name, pid, gpu = self.key.gpu, "shared worker started");
        let entry = PidFile::register(&settings.register, pid);
        let (kill_tx, kill_rx) = mpsc::channel(1);
        let (end_tx, end_rx) = watch::channel(None);
        let process = Process { name, child, pid, grant, _entry: entry };
        self.processes.exits.spawn(watch_process(process, kill_rx, end_tx));
        let is_closed = AtomicBool::new(false);
        let process = SharedProcess { pid, socket, kill_tx, end_rx, is_closed };
        process.send(&MembersCommand::Setup(self.setup.clone()), &[])?;
        Ok(process)
    }
}

async fn watch_process(
    mut process: Process,
    mut kill_rx: mpsc::Receiver<WorkerId>,
    end_tx: watch::Sender<Option<ProcessEnd>>,
) {
    let kill = async {
        match kill_rx.recv().await {
            Some(worker) => EndCause::KilledFor(worker),
            None => {
                // The last worker has ended, and the process exits by itself.
                tokio::time::sleep(EXIT_TIMEOUT).await;
                EndCause::Itself
            }
        }
    };
    let (status, cause) = process.wait_exit(kill).await;
    let status = status.map_err(|error| error.to_string());
    tracing::info!(name = process.name, pid = process.pid, ?status, ?cause, "shared worker exited");
    process.grant.give_back(process.pid);
    // The receivers are gone if the process had no workers any longer.
    end_tx.send_replace(Some(ProcessEnd { status, cause }));
}

impl SharedProcess {
    /// Adds a worker, whose descriptors are `files`.
    pub(super) fn join(&self, request: JoinRequest, files: &[BorrowedFd<'_>]) -> Result<(), SpawnError> {
        self.send(&MembersCommand::Join(request), files)
    }

    fn send(&self, command: &MembersCommand, files: &[BorrowedFd<'_>]) -> Result<(), SpawnError> {
        passing::send(&self.socket, command, files).map_err(SpawnError::Join)
    }

    /// Lets no further worker join. The process exits after its last worker.
    pub(super) fn close(&self) {
        self.is_closed.store(true, Ordering::Relaxed);
    }

    /// Kills the process because of this worker.
    pub(super) fn kill(&self, worker: WorkerId) {
        // A full channel means that a kill is already in progress.
        self.kill_tx.try_send(worker).ok();
    }

    /// Waits for the exit of the process.
    pub(super) async fn ended(&self) -> WorkerEnd {
        let mut end_rx = self.end_rx.clone();
        let end = end_rx.wait_for(Option::is_some).await.ok().and_then(|end| end.clone());
        let unknown = ProcessEnd { status: Err("its task has ended".to_owned()), cause: EndCause::Itself };
        let ProcessEnd { status, cause } = end.unwrap_or(unknown);
        WorkerEnd { status: status.map_err(io::Error::other), shared: Some(cause) }
    }
}
