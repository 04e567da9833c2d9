//! Keeps one daemon and its server alive, and sends their commands: one task, so that no two
//! commands run at the same time.

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
use shadowslice_shared::errors;

/// How often to look at a state that MPS does not announce.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// How many looks a new worker has to show up as a client.
const ADMISSION_LOOKS: u32 = 5;

/// The first pause before a dead daemon is started again, and the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LAST_PAUSE: Duration = Duration::from_secs(10);

/// A daemon that lived as long as this starts anew with the first pause.
const LIVED: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Condition {
    /// Counts the lives of servers: contexts made in an earlier one are lost.
    pub(super) life: u64,
    /// The server, or why there is none for new clients.
    pub(super) server: Result<i32, String>,
    pub(super) daemon: Option<i32>,
}

#[derive(Debug)]
pub(super) enum Request {
    /// Whether a process that has made its context is a client.
    IsClient(i32, oneshot::Sender<Result<bool, ControlError>>),
    Clients(oneshot::Sender<Result<Vec<i32>, ControlError>>),
    Terminate(i32, oneshot::Sender<Result<(), ControlError>>),
    /// A client has died: is the server well?
    Examine,
    /// From now on another supervisor keeps the daemon,
    Pass,
    /// or this one does.
    Keep,
}

/// The stop has a channel of its own, so that it waits in no queue.
#[derive(Debug)]
pub(super) struct Inbox {
    pub(super) requests: mpsc::Receiver<Request>,
    /// The end of everything, at once or not.
    pub(super) stop: oneshot::Receiver<bool>,
}

#[derive(Debug)]
pub(super) struct Keeper {
    pub(super) control: Control,
    pub(super) device: String,
    pub(super) place: Directories,
    pub(super) uid: u32,
    pub(super) condition: watch::Sender<Condition>,
    /// Since when the server is at fault.
    pub(super) fault: Option<Instant>,
    /// Whether another supervisor keeps the daemon, which then goes on when this one ends.
    pub(super) passed: Arc<AtomicBool>,
}

enum Over {
    Asked { at_once: bool },
    Dead(String),
}

impl Keeper {
    /// Starts a daemon and its server, and waits until that takes clients.
    pub(super) async fn start(&self) -> Result<(Daemon, i32), MpsError> {
        self.place
            .make(self.control.several_users)
            .map_err(|source| MpsError::Directories { path: self.place.pipe.clone(), source })?;
        let mut daemon = Daemon::start(&self.control)
            .map_err(|source| MpsError::Program { program: self.control.program.clone(), source })?;
        let ready = tokio::select! {
            status = daemon.ended() => Err(format!("the daemon exited immediately ({})", crate::backend::shown(&status))),
            ready = timeout(self.control.limits.start, self.await_server()) => match ready {
                Ok(ready) => ready.map_err(|error| errors::chain(&error)),
                Err(_) => Err(format!("no MPS server accepted clients within {:?}", self.control.limits.start)),
            },
        };
        match ready {
            Ok(server) => Ok((daemon, server)),
            Err(why) => {
                let log = self.place.logs();
                daemon.kill(&self.control, &self.place).await;
                Err(MpsError::Start { why, log })
            }
        }
    }

    /// Takes over a daemon of another supervisor, and finds its server.
    pub(super) async fn adopt(&self, pid: i32) -> Result<(Daemon, i32), MpsError> {
        let daemon = Daemon::adopt(pid)
            .map_err(|source| MpsError::Program { program: self.control.program.clone(), source })?;
        match self.control.servers().await.map(|servers| servers.first().copied()) {
            Ok(Some(server)) => Ok((daemon, server)),
            Ok(None) => Err(MpsError::Start {
                why: "the MPS control daemon has no server".to_owned(),
                log: self.place.logs(),
            }),
            Err(error) => Err(MpsError::Control(error)),
        }
    }

    async fn await_server(&self) -> Result<i32, ControlError> {
        while self.control.servers().await.is_err() {
            sleep(LOOK_EVERY).await;
        }
        self.control.start_server(self.uid).await?;
        loop {
            if let Some(server) = self.control.servers().await?.first()
                && self.control.server_status(*server).await? == ServerStatus::Active
            {
                return Ok(*server);
            }
            sleep(LOOK_EVERY).await;
        }
    }

    /// Keeps a daemon, and its successors, until asked to stop.
    pub(super) async fn run(mut self, daemon: Daemon, mut inbox: Inbox) {
        let mut next = Some(daemon);
        let mut pause = FIRST_PAUSE;
        while let Some(mut daemon) = next.take() {
            let begun = Instant::now();
            match self.attend(&mut daemon, &mut inbox).await {
                Over::Asked { .. } if self.passed.load(Ordering::Relaxed) => {
                    daemon.pass().await;
                    return;
                }
                Over::Asked { at_once } => {
                    daemon.end(&self.control, &self.place, at_once).await;
                    break;
                }
                Over::Dead(why) if self.passed.load(Ordering::Relaxed) => {
                    self.lost(format!("the MPS control daemon is down: {why}"));
                    return;
                }
                Over::Dead(why) => {
                    let why = format!("the MPS control daemon is down: {why}");
                    tracing::error!(
                        device = self.device,
                        why,
                        log = self.place.logs(),
                        "MPS failed on a GPU; restarting MPS and all workers on this GPU"
                    );
                    self.fault = None;
                    self.lost(why);
                    daemon.kill(&self.control, &self.place).await;
                }
            }
            if begun.elapsed() >= LIVED {
                pause = FIRST_PAUSE;
            }
            next = self.restart(&mut inbox, &mut pause).await;
        }
        self.place.remove();
    }

    /// Starts a daemon after a pause, as often as it takes; `None` if asked to stop meanwhile.
    async fn restart(&self, inbox: &mut Inbox, pause: &mut Duration) -> Option<Daemon> {
        loop {
            let attempt = async {
                sleep(*pause).await;
                self.start().await
            };
            let Some(started) = unless_stopped(inbox, attempt).await else {
                self.place.evict(&self.control.program).await;
                return None;
            };
            *pause = (*pause * 2).min(LAST_PAUSE);
            match started {
                Ok((daemon, server)) => {
                    tracing::info!(
                        device = self.device,
                        server,
                        "MPS restarted; starting the workers of this GPU again"
                    );
                    self.condition.send_modify(|condition| condition.daemon = daemon.pid());
                    self.take_clients(server);
                    return Some(daemon);
                }
                Err(error) => {
                    tracing::error!(
                        device = self.device,
                        error = errors::chain(&error),
                        pause_ms = rounding::ms(*pause),
                        "cannot restart MPS, so this GPU has no workers; trying again after the pause"
                    );
                }
            }
        }
    }

    async fn attend(&mut self, daemon: &mut Daemon, inbox: &mut Inbox) -> Over {
        let mut look = interval(LOOK_EVERY);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                at_once = &mut inbox.stop => return Over::Asked { at_once: at_once.unwrap_or(true) },
                status = daemon.ended() => return Over::Dead(format!("the daemon exited ({})", crate::backend::shown(&status))),
                _ = look.tick(), if self.fault.is_some() => {
                    if let Some(why) = self.recovering().await {
                        return Over::Dead(why);
                    }
                }
                Some(request) = inbox.requests.recv() => match request {
                    Request::Pass => daemon.pass().await,
                    Request::Keep => daemon.keep(&self.control),
                    request => self.serve(request).await,
                },
            }
        }
    }

    /// A receiver that is gone is no error.
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

    /// The clients of the server that is known, or else of all.
    async fn clients(&self) -> Result<Vec<i32>, ControlError> {
        let known = self.condition.borrow().server.clone();
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

    /// A client may be listed a moment after its context is made.
    async fn is_client(&self, pid: i32) -> Result<bool, ControlError> {
        for _ in 0..ADMISSION_LOOKS {
            if self.clients().await?.contains(&pid) {
                return Ok(true);
            }
            sleep(LOOK_EVERY).await;
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
                log = self.place.server_log(),
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
                    log = self.place.server_log(),
                    "the MPS server reports a fault: a worker's GPU error broke every worker on this GPU; restarting all these workers"
                );
                self.lost(
                    "the MPS server reports a fault; the server recovers when all workers on its GPU have exited"
                        .to_owned(),
                );
                self.fault = Some(Instant::now());
            }
            ServerStatus::Active => {
                let before = self.condition.borrow().server.clone();
                if before.is_ok_and(|before| before != server) {
                    tracing::error!(
                        device = self.device,
                        server,
                        log = self.place.server_log(),
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

    /// While the server is at fault. `Some` says why the daemon must be restarted.
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
        self.condition.send_if_modified(|condition| {
            let changed = condition.server != Ok(server);
            condition.server = Ok(server);
            changed
        });
    }

    /// Every context is lost, and no worker is let in for now.
    fn lost(&self, why: String) {
        self.condition.send_modify(|condition| {
            condition.life += 1;
            condition.server = Err(why);
        });
    }
}

/// Any other request is dropped meanwhile, so that its sender gets an error at once.
async fn unless_stopped<T>(inbox: &mut Inbox, work: impl Future<Output = T>) -> Option<T> {
    let mut work = std::pin::pin!(work);
    loop {
        tokio::select! {
            biased;
            _ = &mut inbox.stop => return None,
            done = &mut work => return Some(done),
            Some(_) = inbox.requests.recv() => {}
        }
    }
}
