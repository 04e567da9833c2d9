//! A CUDA GPU under NVIDIA MPS. A separate thread keeps a private control daemon alive, and workers
//! get their share as an environment variable.
//!
//! The share is never set at the server. A worker reads its variable when it creates its context.
//! No function that the control thread calls here waits for the daemon.

mod clients;
mod control;
mod daemon;
mod directories;
mod handover;
mod limits;
mod measurement;
mod monitor;
mod replies;

use shadowslice_shared::rounding;
use std::io;
use std::path::PathBuf;
use std::thread::JoinHandle;
use std::time::Instant;

use parking_lot::Mutex;
use shadowslice_shared::boot::{DeviceSpec, PRIORITY_VARIABLE, SHARE_VARIABLE};
use shadowslice_shared::contention::ClientPriority;
use shadowslice_shared::units::{Percent, Sms};
use tokio::sync::{mpsc, oneshot, watch};

use super::probe::ProbeRunError;
use super::{
    BackendFacts, BackendKind, GpuBackend, GrantError, GrantRequest, Lease, PIPE_DIRECTORY, VISIBLE,
    Variables, Wait,
};
use clients::Clients;
use control::ControlError;
pub use control::{Control, control_program};
use directories::Directories;
pub use handover::MpsHandover;
pub use limits::Limits;
use measurement::{MeasuredGpu, measure};
use monitor::{DaemonMonitor, MonitorInbox, POLL_INTERVAL, Request, ServerState};
use shadowslice_shared::errors;

/// The maximum number of requests that wait for a daemon's monitor. Each worker has at most three.
const MAX_REQUESTS: usize = 256;

#[derive(Debug, thiserror::Error)]
pub enum MpsError {
    #[error(
        "cannot start {program}, which comes with NVIDIA's driver (on Ubuntu in nvidia-compute-utils); install this program, \
         set SHADOWSLICE_MPS_CONTROL to another path, or run without shares: `gpus: [{{device: 0, partition: none}}]`"
    )]
    Program {
        program: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "cannot use the MPS control program; to run without shares, set `gpus: [{{device: 0, partition: none}}]`"
    )]
    Control(#[source] ControlError),
    #[error("cannot create the MPS directory {path}; choose a run_dir that this user can write")]
    Directories {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error(
        "the MPS control daemon did not start: {why}; check this GPU for another MPS daemon or a process in exclusive \
         mode. To run without shares, set `gpus: [{{device: 0, partition: none}}]`. The daemon's log:\n{log}"
    )]
    Start { why: String, log: String },
    #[error("cannot probe the GPU under MPS")]
    Probe(#[source] ProbeRunError),
    #[error("the probe found GPU {found} instead of {expected}; check CUDA_VISIBLE_DEVICES")]
    OtherGpu { expected: String, found: String },
    #[error(
        "a CUDA process gets the whole GPU ({0}) at any share, because the process does not find the MPS server; to run without shares, set `gpus: [{{device: 0, partition: none}}]`"
    )]
    Outside(Sms),
    #[error(
        "an upgrade cannot add or remove workers.users, because an MPS server takes clients of either one user or several; restart the supervisor instead"
    )]
    Users,
    #[error("cannot start the thread that controls MPS; raise the limit on processes")]
    Thread(#[source] io::Error),
}

#[derive(Debug, Clone)]
pub struct MpsSetup {
    /// The name of the GPU in the configuration.
    pub device: String,
    pub index: usize,
    pub uuid: String,
    pub program: PathBuf,
    /// The program that reports what a CUDA process finds, if it runs with `--probe`.
    pub probe: PathBuf,
    /// A folder that only this user can access.
    pub private: PathBuf,
    /// True if clients run as several users. This process must then run as root.
    pub several_users: bool,
    /// The daemon of another supervisor to take over.
    pub handover: Option<MpsHandover>,
    pub limits: Limits,
}

/// A GPU under MPS, whose leases are generations of the server.
#[derive(Debug)]
pub struct MpsGpu {
    setup: MpsSetup,
    environment: Variables,
    facts: BackendFacts,
    /// The SMs of the smallest share.
    least: Sms,
    requests_tx: mpsc::Sender<Request>,
    state: watch::Receiver<ServerState>,
    running: Mutex<Option<Running>>,
    directories: Directories,
    clients: Mutex<Clients>,
    /// True if another supervisor keeps the daemon.
    passed_tx: watch::Sender<bool>,
}

#[derive(Debug)]
struct Running {
    /// The channel for the stop. The value is true if the stop must be immediate.
    stop_tx: oneshot::Sender<bool>,
    thread: JoinHandle<()>,
}

impl MpsGpu {
    /// Starts MPS and measures the GPU. Blocks until MPS accepts clients, for at most a minute or
    /// two.
    pub fn start(setup: MpsSetup) -> Result<Self, MpsError> {
        let directories = match &setup.handover {
            Some(handover) => handover.directories.clone(),
            None => Directories::of(&setup.private, setup.index),
        };
        let environment = vec![
            (VISIBLE, setup.uuid.clone()),
            (PIPE_DIRECTORY, directories.pipe.display().to_string()),
            ("CUDA_MPS_LOG_DIRECTORY", directories.log.display().to_string()),
            // Later control programs could use another protocol by default.
            ("CUDA_MPS_PROTOCOL_VERSION", "2".to_owned()),
        ];
        let control = Control {
            program: setup.program.clone(),
            environment: environment.clone(),
            limits: setup.limits,
            several_users: setup.several_users,
        };
        let unknown = ServerState { generation: 0, server: Err("MPS is starting".to_owned()), daemon: None };
        let (state, state_rx) = watch::channel(unknown);
        let uid = nix::unistd::geteuid().as_raw();
        let (passed_tx, passed_rx) = watch::channel(setup.handover.is_some());
        let monitor = DaemonMonitor {
            control,
            device: setup.device.clone(),
            directories: directories.clone(),
            uid,
            state,
            fault: None,
        };
        let (requests_tx, requests_rx) = mpsc::channel(MAX_REQUESTS);
        let (stop_tx, stop_rx) = oneshot::channel();
        let (started_tx, started_rx) = oneshot::channel();
        let thread =
            spawn(monitor, setup.clone(), MonitorInbox { requests_rx, stop_rx, passed_rx }, started_tx)?;
        let ended = || MpsError::Thread(io::Error::other("the thread ended immediately"));
        let measured = started_rx.blocking_recv().map_err(|_| ended())??;
        let MeasuredGpu { total, least, division } = measured;
        let (device, uuid) = (setup.device.clone(), Some(setup.uuid.clone()));
        Ok(Self {
            facts: BackendFacts::new(device, uuid, BackendKind::Mps, total, division),
            least,
            setup,
            environment,
            requests_tx,
            state: state_rx,
            running: Mutex::new(Some(Running { stop_tx, thread })),
            directories,
            clients: Mutex::default(),
            passed_tx,
        })
    }

    /// Returns true if the process is a client of the MPS server. Blocks until the monitor replies.
    fn is_client(&self, pid: i32) -> Result<bool, String> {
        let (reply, answer) = oneshot::channel();
        let ended = "the MPS control daemon is down".to_owned();
        self.requests_tx.blocking_send(Request::IsClient(pid, reply)).map_err(|_| ended.clone())?;
        answer.blocking_recv().map_err(|_| ended)?.map_err(|error| errors::chain(&error))
    }
}

/// Starts the thread that monitors the daemon. The thread first reports the result of the start,
/// and then serves requests.
fn spawn(
    monitor: DaemonMonitor,
    setup: MpsSetup,
    inbox: MonitorInbox,
    started_tx: oneshot::Sender<Result<MeasuredGpu, MpsError>>,
) -> Result<JoinHandle<()>, MpsError> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(MpsError::Thread)?;
    let work = async move {
        match begin(&monitor, &setup).await {
            Ok((daemon, measured)) => {
                // The receiver is closed only when the supervisor ends.
                started_tx.send(Ok(measured)).ok();
                monitor.run(daemon, inbox).await;
            }
            Err(error) => {
                if !*inbox.passed_rx.borrow() {
                    monitor.directories.remove();
                }
                started_tx.send(Err(error)).ok();
            }
        }
    };
    std::thread::Builder::new()
        .name("mps-control".to_owned())
        .spawn(move || runtime.block_on(work))
        .map_err(MpsError::Thread)
}

async fn begin(monitor: &DaemonMonitor, setup: &MpsSetup) -> Result<(daemon::Daemon, MeasuredGpu), MpsError> {
    if let Some(handover) = &setup.handover {
        return handover.adopt(monitor, setup).await;
    }
    let program = &setup.program;
    let named = std::env::var_os(PIPE_DIRECTORY).map(PathBuf::from);
    if let Some((place, pid)) = directories::foreign_daemon(named, program) {
        tracing::warn!(
            pid,
            place = %place.display(),
            "another MPS control daemon runs on this host, and its clients can use the same GPUs as this supervisor's workers; stop that daemon if you do not need it"
        );
    }
    stop_leftover_daemon(monitor).await;
    let (daemon, server) = monitor.start().await?;
    let found = async {
        let found = measure(monitor, setup).await?;
        tracing::info!(
            device = setup.device,
            uuid = setup.uuid,
            daemon = daemon.pid(),
            server,
            sms = found.total.0,
            least_sms = found.least.0,
            groups = found.division.as_ref().ok().map(|division| division.count()),
            no_partitions = found.division.as_ref().err(),
            "MPS started"
        );
        Ok(found)
    };
    match found.await {
        Ok(found) => {
            monitor.state.send_replace(ServerState {
                generation: 0,
                server: Ok(server),
                daemon: daemon.pid(),
            });
            Ok((daemon, found))
        }
        Err(error) => {
            daemon.stop(&monitor.control, &monitor.directories, true).await;
            Err(error)
        }
    }
}

/// Stops the daemon that a killed supervisor has left behind.
async fn stop_leftover_daemon(monitor: &DaemonMonitor) {
    let left = monitor.directories.users(&monitor.control.program);
    if left.is_empty() {
        return;
    }
    tracing::warn!(device = monitor.device, pids = ?left, "stopping MPS processes of a killed supervisor");
    if let Err(error) = monitor.control.quit().await {
        tracing::debug!(error = errors::chain(&error), "cannot stop the MPS daemon by `quit`");
    }
    monitor.directories.kill_users(&monitor.control.program).await;
    monitor.directories.remove();
}

impl GpuBackend for MpsGpu {
    fn facts(&self) -> &BackendFacts {
        &self.facts
    }

    fn server(&self) -> Result<Option<i32>, String> {
        self.state.borrow().server.clone().map(Some)
    }

    fn sms(&self, share: Percent) -> Sms {
        share.sms_of(self.facts.sms).max(self.least)
    }

    fn enter(&self, joins: bool) -> Result<Lease, GrantError> {
        let state = self.state.borrow();
        if let Err(why) = &state.server {
            return Err(GrantError::Recovering(why.clone()));
        }
        if !joins {
            self.clients.lock().enter(Instant::now()).map_err(|used| GrantError::NoClient { used })?;
        }
        Ok(Lease(state.generation))
    }

    fn leave(&self, _lease: Lease, joins: bool) {
        if !joins {
            self.clients.lock().leave();
        }
    }

    fn refuses_processes(&self) {
        self.clients.lock().refused(Instant::now());
    }

    fn environment(&self, wanted: &GrantRequest) -> Variables {
        let mut environment = self.environment.clone();
        environment.push((SHARE_VARIABLE, wanted.share.get().to_string()));
        // MPS has only the priorities normal (0) and below normal (1), and treats them as a hint.
        environment.push((PRIORITY_VARIABLE, (ClientPriority::of(wanted.priority) as u32).to_string()));
        if let Some(bytes) = wanted.memory_limit {
            let limit = format!("{}={}M", self.setup.uuid, (bytes >> 20).max(1));
            environment.push(("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", limit));
        }
        environment
    }

    fn device(&self, _lease: Lease) -> DeviceSpec {
        DeviceSpec::Cuda
    }

    fn admit(&self, wanted: &GrantRequest, pid: i32, found: Sms) -> Result<(), String> {
        let expected = self.sms(wanted.share);
        if !self.is_client(pid)? {
            return Err(format!(
                "the worker runs outside MPS, with the whole GPU: the worker found {found}, and process {pid} is not a client of the MPS server"
            ));
        }
        if found != expected {
            let share = wanted.share;
            return Err(format!("under MPS, at {share}, the worker found {found} instead of {expected}"));
        }
        Ok(())
    }

    fn terminate(&self, pid: i32) -> Option<Wait> {
        let (requests_tx, limit) = (self.requests_tx.clone(), self.setup.limits.terminate);
        let terminated = async move {
            let (reply, answer) = oneshot::channel();
            requests_tx.send(Request::Terminate(pid, reply)).await.ok()?;
            Some(answer.await.ok()?.map_err(|error| errors::chain(&error)))
        };
        Some(Box::pin(async move {
            let why = match tokio::time::timeout(limit, terminated).await {
                // If the supervisor ends, nothing is logged.
                Ok(None | Some(Ok(()))) => return,
                Ok(Some(Err(why))) => why,
                Err(_) => format!("MPS did not reply within {}", rounding::duration(limit)),
            };
            tracing::warn!(
                pid,
                why,
                "MPS cannot end a worker's GPU work; killing the worker anyway; if this breaks other workers on the GPU, the supervisor restarts them"
            );
        }))
    }

    fn departed(&self, pid: i32) -> Option<Wait> {
        let (requests_tx, limit) = (self.requests_tx.clone(), self.setup.limits.departure);
        let gone = async move {
            // A closed channel means that the supervisor ends.
            requests_tx.send(Request::Examine).await.ok()?;
            loop {
                let (reply, answer) = oneshot::channel();
                requests_tx.send(Request::Clients(reply)).await.ok()?;
                // An error means that no daemon runs, so MPS has no clients.
                if !answer.await.ok()?.ok()?.contains(&pid) {
                    return Some(());
                }
                // The daemon sends no event when a client leaves.
                tokio::time::sleep(POLL_INTERVAL).await;
            }
        };
        Some(Box::pin(async move {
            if tokio::time::timeout(limit, gone).await.is_err() {
                tracing::error!(
                    pid,
                    "MPS still lists a worker that has exited, so its GPU memory may still be in use; if the memory does not become free, restart the supervisor"
                );
            }
        }))
    }

    fn lost(&self, lease: Lease) -> Option<Wait> {
        let (mut state_rx, grace) = (self.state.clone(), self.setup.limits.lost);
        Some(Box::pin(async move {
            let is_lost = state_rx.wait_for(|state| state.generation != lease.0).await.is_ok();
            if !is_lost {
                // The monitor has ended, so the supervisor is stopping too.
                std::future::pending::<()>().await;
            }
            tokio::time::sleep(grace).await;
        }))
    }

    fn handover(&self) -> Option<MpsHandover> {
        MpsHandover::of(self)
    }

    fn pass(&self) {
        self.passed_tx.send_replace(true);
    }

    fn keep(&self) {
        self.passed_tx.send_if_modified(std::mem::take);
    }

    fn stop(&self, at_once: bool) {
        if let Some(Running { stop_tx, thread }) = self.running.lock().take() {
            // Both calls fail only if the monitor has panicked, and the panic is in the log
            // already.
            stop_tx.send(at_once).ok();
            thread.join().ok();
        }
    }
}

impl Drop for MpsGpu {
    fn drop(&mut self) {
        self.stop(true);
    }
}
