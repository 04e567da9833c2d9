//! A CUDA GPU under NVIDIA MPS: a private control daemon, kept alive by a thread of its own, and
//! workers that say their share in their environment.
//!
//! A share is never set at the server: it is a variable of the worker, read with its context.
//! Nothing that the control thread calls here waits for the daemon.

mod control;
mod daemon;
mod directories;
mod handover;
mod limits;
mod monitor;
mod replies;

use shadowslice_shared::rounding;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use shadowslice_shared::boot::{DeviceSpec, PRIORITY_VARIABLE, SHARE_VARIABLE};
use shadowslice_shared::contention::ClientPriority;
use shadowslice_shared::groups::Division;
use shadowslice_shared::units::{Percent, Sms};
use tokio::sync::{mpsc, oneshot, watch};

use super::probe::{Isolation, ProbeError, isolation, probe};
use super::{
    BackendStatus, Environment, GpuBackend, GpuUsage, GrantError, GrantRequest, Lease, PIPE_DIRECTORY,
    VISIBLE, Wait,
};
use control::ControlError;
pub use control::{Control, control_program};
use directories::Directories;
pub use handover::MpsEstate;
pub use limits::Limits;
use monitor::{Condition, Inbox, Keeper, Request};
use shadowslice_shared::errors;

/// Requests that may wait for a daemon's keeper; each worker has at most three.
const REQUESTS: usize = 256;

/// So many failed measurements of whether partitions keep apart mean that they do not.
const ISOLATION_TRIES: u32 = 3;

const LOOK_EVERY: Duration = Duration::from_millis(50);

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
    Probe(#[source] ProbeError),
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
    /// The GPU, as the configuration names it.
    pub device: String,
    pub index: usize,
    pub uuid: String,
    pub program: PathBuf,
    /// The program that tells what a CUDA process finds, when run with `--probe`.
    pub probe: PathBuf,
    /// A folder of this user's alone.
    pub private: PathBuf,
    /// Clients are of several users, for which this process must be root's.
    pub several_users: bool,
    /// What another supervisor has started, to be taken over.
    pub estate: Option<MpsEstate>,
    pub limits: Limits,
}

/// Its leases are lives of the server.
#[derive(Debug)]
pub struct MpsGpu {
    setup: MpsSetup,
    environment: Environment,
    found: Found,
    usage: GpuUsage,
    requests: mpsc::Sender<Request>,
    condition: watch::Receiver<Condition>,
    running: Mutex<Option<Running>>,
    place: Directories,
    /// Whether another supervisor keeps the daemon.
    passed: Arc<AtomicBool>,
}

#[derive(Debug)]
struct Running {
    /// Whether at once.
    stop: oneshot::Sender<bool>,
    thread: JoinHandle<()>,
}

#[derive(Debug)]
struct Found {
    total: Sms,
    least: Sms,
    division: Result<Arc<Division>, String>,
}

impl MpsGpu {
    /// Blocks until clients are taken, for a minute or two at most.
    pub fn start(setup: MpsSetup) -> Result<Self, MpsError> {
        let place = match &setup.estate {
            Some(estate) => estate.place.clone(),
            None => Directories::of(&setup.private, setup.index),
        };
        let surroundings = vec![
            (VISIBLE, setup.uuid.clone()),
            (PIPE_DIRECTORY, place.pipe.display().to_string()),
            ("CUDA_MPS_LOG_DIRECTORY", place.log.display().to_string()),
            // Later control programs could speak another protocol by default.
            ("CUDA_MPS_PROTOCOL_VERSION", "2".to_owned()),
        ];
        let control = Control {
            program: setup.program.clone(),
            environment: surroundings.clone(),
            limits: setup.limits,
            several_users: setup.several_users,
        };
        let unknown = Condition { life: 0, server: Err("MPS is starting".to_owned()), daemon: None };
        let (condition, seen) = watch::channel(unknown);
        let uid = nix::unistd::geteuid().as_raw();
        let passed = Arc::new(AtomicBool::new(setup.estate.is_some()));
        let keeper = Keeper {
            control,
            device: setup.device.clone(),
            place: place.clone(),
            uid,
            condition,
            fault: None,
            passed: Arc::clone(&passed),
        };
        let (requests, asked) = mpsc::channel(REQUESTS);
        let (stop, stopped) = oneshot::channel();
        let (begun, beginning) = oneshot::channel();
        let thread = spawn(keeper, setup.clone(), Inbox { requests: asked, stop: stopped }, begun)?;
        let ended = || MpsError::Thread(io::Error::other("the thread ended immediately"));
        let found = beginning.blocking_recv().map_err(|_| ended())??;
        Ok(Self {
            setup,
            environment: surroundings,
            found,
            usage: GpuUsage::new(true),
            requests,
            condition: seen,
            running: Mutex::new(Some(Running { stop, thread })),
            place,
            passed,
        })
    }

    fn server(&self) -> Result<i32, String> {
        self.condition.borrow().server.clone()
    }

    /// Blocks.
    fn is_client(&self, pid: i32) -> Result<bool, String> {
        let (reply, answer) = oneshot::channel();
        let ended = "the MPS control daemon is down".to_owned();
        self.requests.blocking_send(Request::IsClient(pid, reply)).map_err(|_| ended.clone())?;
        answer.blocking_recv().map_err(|_| ended)?.map_err(|error| errors::chain(&error))
    }
}

/// The thread that keeps the daemon. It says how the start went, and then serves requests.
fn spawn(
    keeper: Keeper,
    setup: MpsSetup,
    inbox: Inbox,
    begun: oneshot::Sender<Result<Found, MpsError>>,
) -> Result<JoinHandle<()>, MpsError> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(MpsError::Thread)?;
    let work = async move {
        match begin(&keeper, &setup).await {
            Ok((daemon, found)) => {
                // The receiver is gone only when the supervisor ends.
                begun.send(Ok(found)).ok();
                keeper.run(daemon, inbox).await;
            }
            Err(error) => {
                if !keeper.passed.load(Ordering::Relaxed) {
                    keeper.place.remove();
                }
                begun.send(Err(error)).ok();
            }
        }
    };
    std::thread::Builder::new()
        .name("mps-control".to_owned())
        .spawn(move || runtime.block_on(work))
        .map_err(MpsError::Thread)
}

async fn begin(keeper: &Keeper, setup: &MpsSetup) -> Result<(daemon::Daemon, Found), MpsError> {
    if let Some(estate) = &setup.estate {
        return estate.adopt(keeper, setup).await;
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
    clear(keeper).await;
    let version = keeper.control.version().await.map_err(|error| missing(program, error))?;
    let (daemon, server) = keeper.start().await?;
    let found = async {
        let found = measure(keeper, setup).await?;
        tracing::info!(
            device = setup.device,
            uuid = setup.uuid,
            version = replies::version(&version),
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
            keeper.condition.send_replace(Condition { life: 0, server: Ok(server), daemon: daemon.pid() });
            Ok((daemon, found))
        }
        Err(error) => {
            daemon.end(&keeper.control, &keeper.place, true).await;
            Err(error)
        }
    }
}

fn missing(program: &Path, error: ControlError) -> MpsError {
    match error {
        ControlError::Command { source: super::command::CommandError::Start { source, .. }, .. } => {
            MpsError::Program { program: program.to_owned(), source }
        }
        other => MpsError::Control(other),
    }
}

/// Ends a daemon that was left here by a supervisor that was killed.
async fn clear(keeper: &Keeper) {
    let left = keeper.place.inhabitants(&keeper.control.program);
    if left.is_empty() {
        return;
    }
    tracing::warn!(device = keeper.device, pids = ?left, "stopping MPS processes of a killed supervisor");
    if let Err(error) = keeper.control.quit().await {
        tracing::debug!(error = errors::chain(&error), "cannot stop the MPS daemon by `quit`");
    }
    keeper.place.evict(&keeper.control.program).await;
    keeper.place.remove();
}

/// The SMs at the whole share, and at the smallest.
async fn measure(keeper: &Keeper, setup: &MpsSetup) -> Result<Found, MpsError> {
    let at = async |share: Percent| {
        let mut environment = keeper.control.environment.clone();
        environment.push((SHARE_VARIABLE, share.get().to_string()));
        let found = probe(&setup.probe, &environment).await.map_err(MpsError::Probe)?;
        if !found.uuid.eq_ignore_ascii_case(&setup.uuid) {
            return Err(MpsError::OtherGpu { expected: setup.uuid.clone(), found: found.uuid });
        }
        Ok(Sms(found.sms))
    };
    let smallest = Percent::new(1).expect("1 is a percentage");
    let (total, least) = (at(Percent::WHOLE).await?, at(smallest).await?);
    let found = Found { total, least, division: division(keeper, setup).await.map(Arc::new) };
    if found.least == found.total { Err(MpsError::Outside(found.total)) } else { Ok(found) }
}

/// A busy host can spoil a measurement, so it is repeated.
async fn division(keeper: &Keeper, setup: &MpsSetup) -> Result<Division, String> {
    let mut tries = 0;
    loop {
        tries += 1;
        let isolation = isolation(&setup.probe, &keeper.control.environment).await;
        match isolation.map_err(|error| errors::chain(&error)).and_then(Isolation::proven) {
            Err(why) if tries < ISOLATION_TRIES => {
                tracing::debug!(
                    device = setup.device,
                    why,
                    "the measurement of partitions failed; measuring again"
                );
            }
            proven => return proven,
        }
    }
}

impl GpuBackend for MpsGpu {
    fn status(&self) -> BackendStatus {
        let server = self.server();
        BackendStatus {
            device: self.setup.device.clone(),
            uuid: Some(self.setup.uuid.clone()),
            backend: "mps",
            sms: self.found.total,
            mps_server_pid: server.as_ref().ok().copied(),
            why: server.err(),
        }
    }

    fn sms(&self, share: Percent) -> Sms {
        share.sms_of(self.found.total).max(self.found.least)
    }

    fn division(&self) -> Result<&Arc<Division>, &str> {
        self.found.division.as_ref().map_err(String::as_str)
    }

    fn usage(&self) -> &GpuUsage {
        &self.usage
    }

    fn enter(&self) -> Result<Lease, GrantError> {
        let condition = self.condition.borrow();
        match &condition.server {
            Ok(_) => Ok(Lease(condition.life)),
            Err(why) => Err(GrantError::Recovering(why.clone())),
        }
    }

    fn environment(&self, wanted: &GrantRequest) -> Environment {
        let mut environment = self.environment.clone();
        environment.push((SHARE_VARIABLE, wanted.share.get().to_string()));
        // MPS knows only normal (0) and below normal (1), and takes the value as a hint.
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
        let (requests, limit) = (self.requests.clone(), self.setup.limits.terminate);
        let asked = async move {
            let (reply, answer) = oneshot::channel();
            requests.send(Request::Terminate(pid, reply)).await.ok()?;
            Some(answer.await.ok()?.map_err(|error| errors::chain(&error)))
        };
        Some(Box::pin(async move {
            match tokio::time::timeout(limit, asked).await {
                // Nothing is said where the supervisor ends.
                Ok(None | Some(Ok(()))) => {}
                Ok(Some(Err(error))) => {
                    tracing::warn!(
                        pid,
                        error,
                        "MPS cannot end a worker's GPU work; killing the worker anyway; if this breaks other workers on the GPU, the supervisor restarts them"
                    )
                }
                Err(_) => {
                    tracing::warn!(
                        pid,
                        limit_ms = rounding::ms(limit),
                        "MPS did not end a worker's GPU work in time; killing the worker anyway; if this breaks other workers on the GPU, the supervisor restarts them"
                    )
                }
            }
        }))
    }

    fn departed(&self, pid: i32) -> Option<Wait> {
        let (requests, limit) = (self.requests.clone(), self.setup.limits.departure);
        let gone = async move {
            // A closed channel means that the supervisor ends.
            requests.send(Request::Examine).await.ok()?;
            loop {
                let (reply, answer) = oneshot::channel();
                requests.send(Request::Clients(reply)).await.ok()?;
                // Without a daemon there are no clients.
                if !answer.await.ok()?.ok()?.contains(&pid) {
                    return Some(());
                }
                // The daemon announces nothing that could be waited for.
                tokio::time::sleep(LOOK_EVERY).await;
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
        let (mut condition, grace) = (self.condition.clone(), self.setup.limits.lost);
        Some(Box::pin(async move {
            let over = condition.wait_for(|condition| condition.life != lease.0).await.is_ok();
            if !over {
                // The keeper has ended, so the supervisor is ending too.
                std::future::pending::<()>().await;
            }
            tokio::time::sleep(grace).await;
        }))
    }

    fn estate(&self) -> Option<MpsEstate> {
        MpsEstate::of(self)
    }

    fn pass(&self) {
        self.passed.store(true, Ordering::Relaxed);
        // Where the queue is full, the end does the same.
        self.requests.try_send(Request::Pass).ok();
    }

    fn keep(&self) {
        if self.passed.swap(false, Ordering::Relaxed) && self.requests.try_send(Request::Keep).is_err() {
            tracing::warn!(
                "the MPS control thread is busy, so no process stops the MPS daemon if the supervisor is killed; after a kill, the daemon runs until the supervisor starts again"
            );
        }
    }

    fn stop(&self, at_once: bool) {
        if let Some(Running { stop, thread }) = self.running.lock().take() {
            // Both fail only if the keeper has panicked, and the panic is on stderr already.
            stop.send(at_once).ok();
            thread.join().ok();
        }
    }
}

impl Drop for MpsGpu {
    fn drop(&mut self) {
        self.stop(true);
    }
}
