//! Keeps one MPS daemon and its server alive, and sends commands to them. A single task does this,
//! so two commands never run at the same time.

use shadowslice_shared::rounding;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};

use super::MpsError;
use super::control::{Control, ControlError};
use super::daemon::Daemon;
use super::directories::Directories;
use super::replies::ServerStatus;
use shadowslice_policy::backoff::Backoff;
use shadowslice_shared::errors;

/// The time between two checks of a state for which MPS sends no event.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The number of checks within which a new worker must appear as a client.
const MAX_ADMISSION_CHECKS: u32 = 5;

/// The first pause before a daemon that has exited is restarted.
const RESTART_BACKOFF: Duration = Duration::from_millis(100);

/// The longest pause before a restart.
const MAX_RESTART_BACKOFF: Duration = Duration::from_secs(10);

/// The uptime of a daemon after which the next restart begins with the first pause again.
const STABLE_TIME: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ServerState {
    /// The number of servers so far. Contexts on earlier servers are lost.
    pub(super) generation: u64,
    /// The server's process ID, or the reason why no server accepts clients.
    pub(super) server: Result<i32, String>,
    pub(super) daemon: Option<i32>,
}

#[derive(Debug)]
pub(super) enum Request {
    /// Checks whether a process that has created its context is a client.
    IsClient(i32, oneshot::Sender<Result<bool, ControlError>>),
    Clients(oneshot::Sender<Result<Vec<i32>, ControlError>>),
    Terminate(i32, oneshot::Sender<Result<(), ControlError>>),
    /// Checks the server after a client has exited.
    Examine,
    /// Passes the daemon to another supervisor.
    Pass,
    /// Keeps a daemon of the previous supervisor.
    Keep,
}

/// The receivers of the monitor. The stop has its own channel, so it never waits in the queue.
#[derive(Debug)]
pub(super) struct Inbox {
    pub(super) requests_rx: mpsc::Receiver<Request>,
    /// The stop of the daemon. The value is true if the stop must be immediate.
    pub(super) stop_rx: oneshot::Receiver<bool>,
}

#[derive(Debug)]
pub(super) struct DaemonMonitor {
    pub(super) control: Control,
    pub(super) device: String,
    pub(super) directories: Directories,
    pub(super) uid: u32,
    pub(super) state: watch::Sender<ServerState>,
    /// The time at which the server's fault was detected, while the server is faulty.
    pub(super) fault: Option<Instant>,
    /// True if another supervisor keeps the daemon, which then continues when this supervisor ends.
    pub(super) passed: Arc<AtomicBool>,
}

enum AttendEnd {
    Stop { at_once: bool },
    Exited(String),
}

impl DaemonMonitor {
    /// Starts a daemon and its server, and waits until the server accepts clients.
    pub(super) async fn start(&self) -> Result<(Daemon, i32), MpsError> {
        self.directories
            .make(self.control.several_users)
            .map_err(|source| MpsError::Directories { path: self.directories.pipe.clone(), source })?;
        let mut daemon = Daemon::start(&self.control)
            .map_err(|source| MpsError::Program { program: self.control.program.clone(), source })?;
        let ready = tokio::select! {
            status = daemon.wait_exit() => Err(format!("the daemon exited immediately ({})", crate::backend::shown(&status))),
            ready = timeout(self.control.limits.start, self.await_server()) => match ready {
                Ok(ready) => ready.map_err(|error| errors::chain(&error)),
                Err(_) => Err(format!("no MPS server accepted clients within {:?}", self.control.limits.start)),
            },
        };
        match ready {
            Ok(server) => Ok((daemon, server)),
            Err(why) => {
                let log = self.directories.logs();
                daemon.kill(&self.control, &self.directories).await;
                Err(MpsError::Start { why, log })
            }
        }
    }

    /// Adopts a daemon of another supervisor, and finds its server.
    pub(super) async fn adopt(&self, pid: i32) -> Result<(Daemon, i32), MpsError> {
        let daemon = Daemon::adopt(pid)
            .map_err(|source| MpsError::Program { program: self.control.program.clone(), source })?;
        match self.control.servers().await.map(|servers| servers.first().copied()) {
            Ok(Some(server)) => Ok((daemon, server)),
            Ok(None) => Err(MpsError::Start {
                why: "the MPS control daemon has no server".to_owned(),
                log: self.directories.logs(),
            }),
            Err(error) => Err(MpsError::Control(error)),
        }
    }

    async fn await_server(&self) -> Result<i32, ControlError> {
        while self.control.servers().await.is_err() {
            sleep(POLL_INTERVAL).await;
        }
        self.control.start_server(self.uid).await?;
        loop {
            if let Some(server) = self.control.servers().await?.first()
                && self.control.server_status(*server).await? == ServerStatus::Active
            {
                return Ok(*server);
            }
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Monitors a daemon and restarts it when it exits, until a stop is requested.
    pub(super) async fn run(mut self, daemon: Daemon, mut inbox: Inbox) {
        let mut next = Some(daemon);
        let mut backoff = Backoff::new(RESTART_BACKOFF, MAX_RESTART_BACKOFF);
        while let Some(mut daemon) = next.take() {
            let begun = Instant::now();
            match self.attend(&mut daemon, &mut inbox).await {
                AttendEnd::Stop { .. } if self.passed.load(Ordering::Relaxed) => {
                    daemon.pass().await;
                    return;
                }
                AttendEnd::Stop { at_once } => {
                    daemon.stop(&self.control, &self.directories, at_once).await;
                    break;
                }
                AttendEnd::Exited(why) if self.passed.load(Ordering::Relaxed) => {
                    self.lost(format!("the MPS control daemon is down: {why}"));
                    return;
                }
                AttendEnd::Exited(why) => {
                    let why = format!("the MPS control daemon is down: {why}");
                    tracing::error!(
                        device = self.device,
                        why,
                        log = self.directories.logs(),
                        "MPS failed on a GPU; restarting MPS and all workers on this GPU"
                    );
                    self.fault = None;
                    self.lost(why);
                    daemon.kill(&self.control, &self.directories).await;
                }
            }
            if begun.elapsed() >= STABLE_TIME {
                backoff.reset();
            }
            next = self.restart(&mut inbox, &mut backoff).await;
        }
        self.directories.remove();
    }

    /// Tries to start a daemon, with pauses, until it succeeds. Returns `None` if a stop is
    /// requested.
    async fn restart(&self, inbox: &mut Inbox, backoff: &mut Backoff) -> Option<Daemon> {
        let mut pause = backoff.record_failure();
        loop {
            let attempt = async {
                sleep(pause).await;
                self.start().await
            };
            let Some(started) = unless_stopped(inbox, attempt).await else {
                self.directories.kill_users(&self.control.program).await;
                return None;
            };
            match started {
                Ok((daemon, server)) => {
                    tracing::info!(
                        device = self.device,
                        server,
                        "MPS restarted; starting the workers of this GPU again"
                    );
                    self.state.send_modify(|state| state.daemon = daemon.pid());
                    self.take_clients(server);
                    return Some(daemon);
                }
                Err(error) => {
                    pause = backoff.record_failure();
                    tracing::error!(
                        device = self.device,
                        error = errors::chain(&error),
                        pause_ms = rounding::ms(pause),
                        "cannot restart MPS, so this GPU has no workers; trying again after the pause"
                    );
                }
            }
        }
    }

    async fn attend(&mut self, daemon: &mut Daemon, inbox: &mut Inbox) -> AttendEnd {
        let mut poll = interval(POLL_INTERVAL);
        poll.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                at_once = &mut inbox.stop_rx => return AttendEnd::Stop { at_once: at_once.unwrap_or(true) },
                status = daemon.wait_exit() => return AttendEnd::Exited(format!("the daemon exited ({})", crate::backend::shown(&status))),
                _ = poll.tick(), if self.fault.is_some() => {
                    if let Some(why) = self.recovering().await {
                        return AttendEnd::Exited(why);
                    }
                }
                Some(request) = inbox.requests_rx.recv() => match request {
                    Request::Pass => daemon.pass().await,
                    Request::Keep => daemon.keep(&self.control),
                    request => self.serve(request).await,
                },
            }
        }
    }

    /// Serves a request. Ignores a reply channel that is closed.
    async fn serve(&mut self, request: Request) {
        match request {
            Request::IsClient(pid, reply) => drop(reply.send(self.is_client(pid).await)),
            Request::Clients(reply) => drop(reply.send(self.clients().await)),
            Request::Terminate(client, reply) => drop(reply.send(self.terminate(client).await)),
            Request::Pass | Request::Keep => {}
            Request::Examine => {
                if let Err(error) = self.examine().await {
                    tracing::warn!(
                        device = self.device,
                        error = errors::chain(&error),
                        "cannot check the MPS server after a worker's exit; checking again after the next exit"
                    );
                }
            }
        }
    }

    /// Returns the clients of the known server, or of all servers if no server is known.
    async fn clients(&self) -> Result<Vec<i32>, ControlError> {
        let known = self.state.borrow().server.clone();
        if let Ok(known) = known
            && let Ok(clients) = self.control.clients(known).await
        {
            return Ok(clients);
        }
        let mut clients = Vec::new();
        for server in self.control.servers().await? {
            clients.extend(self.control.clients(server).await?);
        }
        Ok(clients)
    }

    /// Returns true if the process is a client. MPS can list a client some time after it has
    /// created its context.
    async fn is_client(&self, pid: i32) -> Result<bool, ControlError> {
        for _ in 0..MAX_ADMISSION_CHECKS {
            if self.clients().await?.contains(&pid) {
                return Ok(true);
            }
            sleep(POLL_INTERVAL).await;
        }
        Ok(false)
    }

    async fn terminate(&self, client: i32) -> Result<(), ControlError> {
        for server in self.control.servers().await? {
            if self.control.clients(server).await?.contains(&client) {
                return self.control.terminate(server, client).await;
            }
        }
        Ok(())
    }

    async fn examine(&mut self) -> Result<(), ControlError> {
        if self.fault.is_some() {
            return Ok(());
        }
        let Some(server) = self.control.servers().await?.first().copied() else {
            tracing::error!(
                device = self.device,
                log = self.directories.server_log(),
                "the MPS server exited, which broke every worker on this GPU; starting another MPS server and new workers"
            );
            self.lost("the MPS server exited".to_owned());
            self.fault = Some(Instant::now());
            return self.control.start_server(self.uid).await;
        };
        match self.control.server_status(server).await? {
            ServerStatus::Fault => {
                tracing::error!(
                    device = self.device,
                    server,
                    log = self.directories.server_log(),
                    "the MPS server reports a fault: a worker's GPU error broke every worker on this GPU; restarting all these workers"
                );
                self.lost(
                    "the MPS server reports a fault; the server recovers when all workers on its GPU have exited"
                        .to_owned(),
                );
                self.fault = Some(Instant::now());
            }
            ServerStatus::Active => {
                let before = self.state.borrow().server.clone();
                if before.is_ok_and(|before| before != server) {
                    tracing::error!(
                        device = self.device,
                        server,
                        log = self.directories.server_log(),
                        "the previous MPS server exited, which broke every worker on this GPU; restarting the workers on the new server"
                    );
                    self.lost("the MPS server exited".to_owned());
                }
                self.take_clients(server);
            }
            ServerStatus::Other(status) => {
                tracing::warn!(
                    device = self.device,
                    server,
                    status,
                    "the MPS server reports an unknown status; not restarting the server, and checking again after a worker's next exit"
                );
            }
        }
        Ok(())
    }

    /// Checks a faulty server. Returns the reason if the daemon must be restarted.
    async fn recovering(&mut self) -> Option<String> {
        let since = self.fault?;
        if let Ok(servers) = self.control.servers().await
            && let Some(server) = servers.first()
            && matches!(self.control.server_status(*server).await, Ok(ServerStatus::Active))
        {
            tracing::info!(
                device = self.device,
                server,
                took_ms = rounding::ms(since.elapsed()),
                "the MPS server has recovered; starting the workers of this GPU again"
            );
            self.fault = None;
            self.take_clients(*server);
            return None;
        }
        let limit = self.control.limits.fault;
        (since.elapsed() > limit)
            .then(|| format!("the MPS server did not recover within {}", rounding::duration(limit)))
    }

    fn take_clients(&self, server: i32) {
        self.state.send_if_modified(|state| {
            let changed = state.server != Ok(server);
            state.server = Ok(server);
            changed
        });
    }

    /// Marks every context as lost, and stops admitting workers for now.
    fn lost(&self, why: String) {
        self.state.send_modify(|state| {
            state.generation += 1;
            state.server = Err(why);
        });
    }
}

/// Performs `work`, or returns `None` if a stop is requested. Drops all other requests in the
/// meantime, so their senders get an error immediately.
async fn unless_stopped<T>(inbox: &mut Inbox, work: impl Future<Output = T>) -> Option<T> {
    let mut work = std::pin::pin!(work);
    loop {
        tokio::select! {
            biased;
            _ = &mut inbox.stop_rx => return None,
            done = &mut work => return Some(done),
            Some(_) = inbox.requests_rx.recv() => {}
        }
    }
}
