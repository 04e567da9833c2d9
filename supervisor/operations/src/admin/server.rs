//! The server of the control socket.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use shadowslice_shared::units::{Percent, ms};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixSocket, UnixStream};
use tokio::sync::{Semaphore, mpsc, oneshot, watch};

use super::sleep::sleep;
use super::{ControlReply, ControlRequest, MAX_REQUEST_BYTES, SOCKET};
use crate::history::History;
use crate::plan::PlanReport;
use crate::status::{self, HostStatus, ModelStatus, RolloutStatus, SeenPhase, SupervisorStatus};
use crate::top::TopReply;
use shadowslice_config::{ControllerConfig, Peers};
use shadowslice_control::backend::GpuBackend;
use shadowslice_control::controller::{Cause, ChangeOutcome, Order, Planned, ResizeRefused, VersionRole};
use shadowslice_control::models::{
    BegunRollout, CommandedRollout, ModelSet, Needs, Registry, ReloadRefused, RolloutCommand, RolloutRequest,
    Served, Unloaded, stage_name,
};
use shadowslice_control::nvml::{Reading, Readings};
use shadowslice_datapath::clock::Clock;
use shadowslice_datapath::peer::{AuditOutcome, Guard, Peer, Refusals, UnknownAccount, audit};
use shadowslice_datapath::phase::PhaseReceiver;
use shadowslice_datapath::readiness::HostState;
use shadowslice_datapath::repository::ModelCommandError;
use shadowslice_datapath::router::Router;
use shadowslice_datapath::sockets::{Inherited, PassableSocket, SocketFile};
use shadowslice_datapath::tenants::Tenants;

/// The pause after a failed accept. Without a pause, the server would retry in a busy loop, because
/// the cause (such as too many open files) usually lasts for a while.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);

/// The largest number of connections that are served at the same time.
const MAX_CONNECTIONS: usize = 64;

/// The largest number of connections that the kernel queues until they are accepted.
const BACKLOG: u32 = MAX_CONNECTIONS as u32;

/// The time within which a client must send its request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// The time within which a client must read its reply.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);

/// The time after which the state of a rollout is returned even if nothing has changed. A client that has
/// gone occupies its connection for this time.
const FOLLOW_TIMEOUT: Duration = Duration::from_secs(20);

/// The parts of the supervisor that commands read and change.
#[derive(Debug)]
pub struct AdminContext {
    /// The time at which this process began to serve, or took over from another process.
    pub since: Instant,
    /// The absolute path of the configuration file.
    pub config: PathBuf,
    pub router: Arc<Router>,
    pub models: watch::Receiver<Arc<ModelSet>>,
    pub registry: Registry,
    pub upgrades: mpsc::Sender<Upgrade>,
    /// The phase of the supervisor. Commands that change something are refused while models move
    /// between two supervisors.
    pub phase: PhaseReceiver,
    /// The GPUs in the order of the configuration.
    pub gpus: Vec<Arc<dyn GpuBackend>>,
    pub readings: Arc<Readings>,
    pub clock: Clock,
    pub tenants: Arc<Tenants>,
    pub controller: ControllerConfig,
    pub history: Arc<History>,
    /// The policy's last decision, or `None` without a policy.
    pub planned: Option<watch::Receiver<Planned>>,
}

/// A request to hand over to a new supervisor process.
#[derive(Debug)]
pub struct Upgrade {
    /// The sender for the result: the new process's id, or the reason why this process continues to
    /// serve.
    pub reply: oneshot::Sender<Result<u32, String>>,
}

impl AdminContext {
    pub fn models(&self) -> Arc<ModelSet> {
        Arc::clone(&self.models.borrow())
    }

    pub fn plan(&self) -> PlanReport {
        let mut plan = self.decided();
        let (models, watched) = (self.models(), self.readings.look());
        for plan in &mut plan.models {
            let served = models.served.iter().find(|served| served.shown_name() == plan.name);
            plan.overload =
                served.and_then(|served| Needs::of(served, &watched).overload(&served.pipeline.rates()));
            plan.paused = served.and_then(|served| status::pauses(&served.pipeline));
            plan.streams = served.and_then(status::streams);
        }
        plan
    }

    fn decided(&self) -> PlanReport {
        let planned = self.planned.as_ref().map(watch::Receiver::borrow);
        let mut plan = PlanReport::of(&self.controller, planned.as_deref());
        let models = self.models();
        for plan in &mut plan.models {
            let served = models.served.iter().find(|served| served.model.name == plan.name);
            if let Some(served) = served {
                plan.name = served.shown_name();
            }
        }
        plan
    }

    /// Counts the SM time up to now, and divides the energy that each GPU has used among its models.
    fn count_sm_time(&self, watched: &[Option<Reading>]) {
        for (gpu, reading) in self.gpus.iter().zip(watched) {
            let (sm_time, now) = (&gpu.facts().sm_time, self.clock.now());
            sm_time.advance(now);
            let usage = reading.as_ref().and_then(|reading| reading.usage.as_ref());
            if let Some(energy_mj) = usage.and_then(|usage| usage.power.energy_mj) {
                sm_time.charge(energy_mj, now);
            }
        }
    }

    pub fn status(&self) -> HostStatus {
        let watched = self.readings.look();
        self.count_sm_time(&watched);
        let gpus = self.gpus.iter().zip(&watched).enumerate();
        let plan = self.decided();
        let models = self.models();
        let served = models.served.iter().map(|model| {
            let plan = plan.models.iter().find(|plan| plan.name == model.shown_name());
            let (name, takes_part) = (model.model.served_name(), model.role != VersionRole::Loaded);
            let rollout = models.rollouts.iter().find(|rollout| rollout.model == name && takes_part);
            ModelStatus {
                drained: self.router.is_drained(name),
                rollout: rollout.and_then(RolloutStatus::of),
                ..status::of_served(model, &watched, plan)
            }
        });
        let unloaded = models.unloaded.iter().map(status::of_unloaded);
        HostStatus {
            supervisor: Some(SupervisorStatus::own(self.since, &self.config)),
            host: self.router.host(),
            ready: self.router.ready(),
            upgrading: self.phase.borrow().is_upgrading(),
            models: served.chain(unloaded).collect(),
            gpus: gpus
                .map(|(index, (gpu, watched))| {
                    status::of_gpu(index, &**gpu, watched.as_ref(), self.clock.now())
                })
                .collect(),
            tenants: status::of_tenants(&self.tenants),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ControlSocketError {
    #[error(
        "cannot replace {0} with the control socket; remove this file or folder, or choose another run_dir"
    )]
    Remove(PathBuf, #[source] io::Error),
    #[error("cannot create the control socket {0}; choose another run_dir")]
    Bind(PathBuf, #[source] io::Error),
    #[error("cannot set the permissions of the control socket {0}; choose another run_dir")]
    Protect(PathBuf, #[source] io::Error),
    #[error("cannot give the users and groups in `control` access to the control socket")]
    Admit(#[from] UnknownAccount),
}

/// The control socket on which the supervisor listens. Dropping this value removes the socket's
/// file.
#[derive(Debug)]
pub struct Admin {
    listener: Arc<UnixListener>,
    file: Arc<SocketFile>,
    guard: Guard,
}

impl Admin {
    /// Binds the socket in `run_dir`. The caller must hold the lock of `run_dir`. An existing
    /// socket file therefore belongs to `inherited` or to a supervisor that has died. Root, this
    /// user and `others` have the permission to send commands.
    pub fn bind(
        run_dir: &Path,
        others: Option<&Peers>,
        inherited: &mut Inherited,
        refusals: &Arc<Refusals>,
    ) -> Result<Self, ControlSocketError> {
        let path = run_dir.join(SOCKET);
        let guard = others.map(|others| Guard::only(others, refusals)).transpose()?;
        let guard = guard.unwrap_or_else(Guard::everybody);
        // If the configuration lists accounts, every user can connect, and the guard rejects users
        // that are not listed.
        let mode = if others.is_some() { 0o666 } else { 0o600 };
        let failed = |error| ControlSocketError::Bind(path.clone(), error);
        let (listener, file) = match inherited.take(SOCKET) {
            Some(socket) => {
                protect(&path, mode)?;
                (UnixListener::from_std(socket.into()).map_err(failed)?, SocketFile::inherited(&path))
            }
            None => (listen(&path, mode)?, SocketFile::new(&path)),
        };
        let file = file.map_err(failed)?;
        Ok(Self { listener: Arc::new(listener), file: Arc::new(file), guard })
    }

    /// Returns the socket in a form that can be passed to the next supervisor.
    pub fn passable(&self) -> PassableSocket {
        PassableSocket::new(SOCKET.to_owned(), &self.listener, Some(&self.file))
    }

    pub async fn run(&self, context: Arc<AdminContext>) {
        let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        loop {
            let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
            match self.listener.accept().await {
                Ok((stream, _)) => {
                    // If the peer's credentials are unknown, the connection is closed.
                    let Ok(peer) = Peer::of_unix(&stream) else { continue };
                    if !self.guard.permits(&peer, "connect", SOCKET) {
                        continue;
                    }
                    let context = Arc::clone(&context);
                    tokio::spawn(async move {
                        if let Err(error) = handle(stream, &peer, &context).await {
                            tracing::debug!(%error, "a connection to the control socket failed");
                        }
                        drop(place);
                    });
                }
                Err(error) => {
                    tracing::warn!(
                        %error,
                        "cannot accept a connection to the control socket; trying again, while commands wait"
                    );
                    // The process has probably run out of file descriptors. File descriptors become
                    // free when connections end.
                    tokio::time::sleep(ACCEPT_BACKOFF).await;
                }
            }
        }
    }
}

/// Creates the socket. If a file with the socket's name exists, replaces it.
fn listen(path: &Path, mode: u32) -> Result<UnixListener, ControlSocketError> {
    if let Err(error) = std::fs::remove_file(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        return Err(ControlSocketError::Remove(path.to_owned(), error));
    }
    let failed = |error| ControlSocketError::Bind(path.to_owned(), error);
    let socket = UnixSocket::new_stream().map_err(failed)?;
    socket.bind(path).map_err(failed)?;
    // No client can connect before `listen`, so no client connects before the permissions are set.
    protect(path, mode)?;
    socket.listen(BACKLOG).map_err(failed)
}

fn protect(path: &Path, mode: u32) -> Result<(), ControlSocketError> {
    let permissions = std::fs::Permissions::from_mode(mode);
    std::fs::set_permissions(path, permissions)
        .map_err(|error| ControlSocketError::Protect(path.to_owned(), error))
}

async fn handle(stream: UnixStream, peer: &Peer, context: &AdminContext) -> io::Result<()> {
    let (read, mut write) = stream.into_split();
    let mut lines = BufReader::new(read.take(MAX_REQUEST_BYTES));
    let mut line = Vec::new();
    let read = tokio::time::timeout(REQUEST_TIMEOUT, lines.read_until(b'\n', &mut line)).await;
    read.map_err(|_| io::ErrorKind::TimedOut)??;
    let answer = match serde_json::from_slice::<ControlRequest>(&line) {
        Ok(request) => audited(request, peer, context).await,
        Err(error) => ControlReply::Refused(format!("invalid request: {error}")),
    };
    let mut text = serde_json::to_vec(&answer)?;
    text.push(b'\n');
    tokio::time::timeout(WRITE_TIMEOUT, write.write_all(&text)).await.map_err(|_| io::ErrorKind::TimedOut)?
}

/// Executes a request. Writes an audit message if the request changes something.
async fn audited(request: ControlRequest, peer: &Peer, context: &AdminContext) -> ControlReply {
    let command = request.command().map(|(action, on)| (action, on.to_owned()));
    let reply = reply_to(request, context).await;
    if let Some((action, on)) = command {
        let failed_outcome;
        let outcome = match &reply {
            ControlReply::Refused(why) => AuditOutcome::Failed(why),
            // The reload has already logged each error.
            ControlReply::Faulty(_) => AuditOutcome::Failed("the configuration has errors"),
            ControlReply::Handover { report, .. } if report.outcome != ChangeOutcome::Completed => {
                failed_outcome = report.outcome.to_string();
                AuditOutcome::Failed(report.why.as_deref().unwrap_or(&failed_outcome))
            }
            ControlReply::Reloaded(report) => {
                let failed = report.models.iter().find_map(|model| model.why.as_deref());
                failed.map_or(AuditOutcome::Done, AuditOutcome::Failed)
            }
            _ => AuditOutcome::Done,
        };
        audit(peer, action, &on, outcome);
    }
    reply
}

async fn reply_to(request: ControlRequest, context: &AdminContext) -> ControlReply {
    let answered = match request {
        ControlRequest::Resize { .. }
        | ControlRequest::Hold { .. }
        | ControlRequest::Sleep { .. }
        | ControlRequest::Reload
        | ControlRequest::Move { .. }
        | ControlRequest::Rollout { .. }
        | ControlRequest::Promote { .. }
        | ControlRequest::Rollback { .. }
            if context.phase.borrow().is_upgrading() =>
        {
            Err(ModelCommandError::Succession.to_string())
        }
        ControlRequest::Status => Ok(ControlReply::Status(context.status())),
        ControlRequest::Top => Ok(ControlReply::Top(TopReply {
            status: context.status(),
            plan: context.plan(),
            samples: context.history.latest(),
        })),
        ControlRequest::Resize { model, share_percent } => resize(&model, share_percent, context).await,
        ControlRequest::Hold { model, held } => hold(&model, held, context).await,
        ControlRequest::Sleep { model, asleep } => match named(&model, context) {
            Ok(served) => sleep(&served, asleep).await,
            Err(why) => Err(why),
        },
        ControlRequest::Plan => Ok(ControlReply::Plan(context.plan())),
        ControlRequest::Reload => reload(context).await,
        ControlRequest::Move { model, gpu } => place(&model, gpu, context).await,
        ControlRequest::Rollout { model, path, changes } => {
            rollout(&RolloutRequest { model, path, changes }, context).await
        }
        ControlRequest::FollowRollout { model, candidate, seen } => {
            follow_rollout(&model, candidate, seen, context).await
        }
        ControlRequest::Promote { model } => command_rollout(&model, RolloutCommand::Promote, context).await,
        ControlRequest::Rollback { model } => {
            command_rollout(&model, RolloutCommand::RollBack, context).await
        }
        ControlRequest::Upgrade => upgrade(context).await,
        ControlRequest::Drain { model, drained } => drain(model.as_deref(), drained, context),
    };
    answered.unwrap_or_else(ControlReply::Refused)
}

fn named(name: &str, context: &AdminContext) -> Result<Served, String> {
    let models = context.models();
    if let Some(model) = models.unloaded.iter().find(|model| model.shown_name() == name) {
        return Err(format!("model '{name}' is not loaded: {}", model.why));
    }
    let versioned =
        |served: &Served| format!("{}:{}", served.model.served_name(), served.model.version.number);
    let is_it = |served: &&Served| served.shown_name() == name || versioned(served) == name;
    models.served.iter().find(is_it).cloned().ok_or_else(|| {
        let unloaded = models.unloaded.iter().map(Unloaded::shown_name);
        let names: Vec<_> = models.served.iter().map(Served::shown_name).chain(unloaded).collect();
        format!("model '{name}' not found; the models are: {}", names.join(", "))
    })
}

async fn order<T>(
    name: &str,
    context: &AdminContext,
    order: impl FnOnce(oneshot::Sender<T>) -> Order,
) -> Result<T, String> {
    let (reply, outcome) = oneshot::channel();
    let full = |_| format!("too many commands are queued for model '{name}'; try again later");
    named(name, context)?.orders.try_send(order(reply)).map_err(full)?;
    outcome.await.map_err(|_| ResizeRefused::Stopping.to_string())
}

async fn hold(name: &str, held: bool, context: &AdminContext) -> Result<ControlReply, String> {
    let news = order(name, context, |reply| Order::Hold { held, reply }).await?;
    Ok(ControlReply::Held { held, news })
}

fn drain(model: Option<&str>, drained: bool, context: &AdminContext) -> Result<ControlReply, String> {
    if context.router.host() == HostState::Stopping {
        return Err("the supervisor is stopping, so the host stays drained".to_owned());
    }
    let served = model.map(|name| named(name, context)).transpose()?;
    let name = served.as_ref().map(|served| served.model.served_name());
    let news = context.router.drain(name, drained);
    Ok(ControlReply::Drained { drained, news })
}

async fn resize(name: &str, share_percent: u32, context: &AdminContext) -> Result<ControlReply, String> {
    let share = Percent::new(share_percent).map_err(|error| error.to_string())?;
    let resize = |reply| Order::Resize { share, groups: None, cause: Cause::Hand, hold: true, reply };
    let acts = context.controller.acting_policy().is_some();
    match order(name, context, resize).await? {
        Ok(report) => {
            let held = acts && report.from_sms != report.to_sms;
            Ok(ControlReply::Handover { report, held })
        }
        Err(refused @ ResizeRefused::InForce { serves, .. }) => {
            Ok(ControlReply::Unchanged { why: refused.to_string(), held: acts && serves })
        }
        Err(refused) => Err(refused.to_string()),
    }
}

async fn reload(context: &AdminContext) -> Result<ControlReply, String> {
    match context.registry.reload().await {
        Ok(report) => Ok(ControlReply::Reloaded(report)),
        Err(ReloadRefused::Faulty(faults)) => Ok(ControlReply::Faulty(faults)),
        Err(refused) => Err(refused.to_string()),
    }
}

async fn place(model: &str, gpu: usize, context: &AdminContext) -> Result<ControlReply, String> {
    let news = context.registry.move_to_gpu(model, gpu).await?;
    Ok(ControlReply::Placed { gpu, news })
}

async fn rollout(request: &RolloutRequest, context: &AdminContext) -> Result<ControlReply, String> {
    let BegunRollout { candidate, former } = context.registry.begin_rollout(request).await?;
    Ok(ControlReply::RolloutBegun { candidate, former })
}

/// Waits until a rollout has another phase than the one that the client has seen.
async fn follow_rollout(
    model: &str,
    candidate: u32,
    seen: Option<SeenPhase>,
    context: &AdminContext,
) -> Result<ControlReply, String> {
    let status = |models: &Arc<ModelSet>| {
        let rollout = models.rollouts.iter().find(|rollout| rollout.model == model);
        rollout.and_then(RolloutStatus::of).filter(|status| status.candidate == candidate)
    };
    let mut models_rx = context.models.clone();
    let is_news = |models: &Arc<ModelSet>| status(models).map(|status| status.seen()) != seen;
    // After a timeout, the client asks again if it is still there.
    if let Ok(Err(_)) = tokio::time::timeout(FOLLOW_TIMEOUT, models_rx.wait_for(is_news)).await {
        return Err("the supervisor is stopping".to_owned());
    }
    let models = context.models();
    let ended = || format!("the rollout of version {candidate} has ended; see `shadowslice status`");
    status(&models).map(ControlReply::Rollout).ok_or_else(ended)
}

async fn command_rollout(
    model: &str,
    command: RolloutCommand,
    context: &AdminContext,
) -> Result<ControlReply, String> {
    let CommandedRollout { version, stage, took } = context.registry.command_rollout(model, command).await?;
    let stage = stage_name(stage).to_owned();
    Ok(ControlReply::RolloutChanged { version, stage, took_ms: ms(took) })
}

async fn upgrade(context: &AdminContext) -> Result<ControlReply, String> {
    if context.phase.borrow().is_upgrading() {
        return Err("an upgrade is already in progress".to_owned());
    }
    let (reply, outcome) = oneshot::channel();
    let busy = |_| "an upgrade is already in progress, or the supervisor is stopping".to_owned();
    context.upgrades.try_send(Upgrade { reply }).map_err(busy)?;
    let pid = outcome.await.map_err(|_| "the supervisor is stopping".to_owned())??;
    Ok(ControlReply::Upgraded { pid })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_file_in_place_of_the_socket_is_removed_or_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(SOCKET);
        std::fs::write(&path, "stale").unwrap();
        let bind = || Admin::bind(folder.path(), None, &mut Inherited::default(), &Arc::default());
        drop(bind().unwrap());
        std::fs::create_dir(&path).unwrap();
        let fault = bind().unwrap_err();
        assert!(matches!(fault, ControlSocketError::Remove(named, _) if named == path));
    }
}
