//! The supervisor's side of the control socket.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use shadowslice_shared::units::Percent;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixSocket, UnixStream};
use tokio::sync::{Semaphore, mpsc, oneshot, watch};

use super::{Ask, MAX_REQUEST_BYTES, Reply, SOCKET};
use crate::status::{self, LoadedStatus, ModelStatus, Status, SupervisorStatus};
use shadowslice_config::{ControllerConfig, Peers};
use shadowslice_control::backend::GpuBackend;
use shadowslice_control::controller::{
    Cause, ModelPlan, Order, PlanReport, Planned, ResizeRefused, WorkerReport,
};
use shadowslice_control::models::{Command, ModelSet, Needs, ReloadRefused, Served};
use shadowslice_control::nvml::{Readings, Watched};
use shadowslice_datapath::peer::{Guard, Outcome, Peer, Refusals, UnknownAccount, audit};
use shadowslice_datapath::readiness::Host;
use shadowslice_datapath::repository::WishRefused;
use shadowslice_datapath::router::Router;
use shadowslice_datapath::sockets::{Inherited, Passable, SocketFile};

/// A failure such as too many open files does not pass at once.
const REST: Duration = Duration::from_millis(100);

const MAX_CONVERSATIONS: usize = 64;

/// Conversations that the kernel keeps until they are accepted; as many as may be held.
const BACKLOG: u32 = MAX_CONVERSATIONS as u32;

const ASK_TIMEOUT: Duration = Duration::from_secs(10);

const READ_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub struct Reach {
    /// When this process began to serve or to take over.
    pub since: Instant,
    /// The configuration's file, absolute.
    pub config: PathBuf,
    pub router: Arc<Router>,
    pub models: watch::Receiver<Arc<ModelSet>>,
    pub commands: mpsc::Sender<Command>,
    pub upgrades: mpsc::Sender<Upgrade>,
    /// Whether the next supervisor is being started, which would not know of orders given now.
    pub rising: watch::Receiver<bool>,
    /// As the configuration orders them.
    pub gpus: Vec<Arc<dyn GpuBackend>>,
    pub readings: Arc<Readings>,
    pub controller: ControllerConfig,
    /// `None` where no policy decides.
    pub planned: Option<watch::Receiver<Planned>>,
}

/// An order to have another process take over, with the place for what comes of it: the process's
/// number, or why this one serves on.
#[derive(Debug)]
pub struct Upgrade {
    pub reply: oneshot::Sender<Result<u32, String>>,
}

impl Reach {
    pub fn models(&self) -> Arc<ModelSet> {
        Arc::clone(&self.models.borrow())
    }

    pub fn plan(&self) -> PlanReport {
        let mut plan = self.decided();
        let (models, watched) = (self.models(), self.readings.look());
        for plan in &mut plan.models {
            let served = models.served.iter().find(|served| served.model.name == plan.name);
            plan.overload =
                served.and_then(|served| Needs::of(served, &watched).overload(&served.pipeline.rates()));
        }
        plan
    }

    fn decided(&self) -> PlanReport {
        let decided = self.planned.as_ref().map(|planned| planned.borrow().report.clone());
        decided.unwrap_or_else(|| PlanReport::nothing_yet(&self.controller))
    }

    pub fn status(&self) -> Status {
        let watched = self.readings.look();
        let gpus = self.gpus.iter().zip(&watched).enumerate();
        let plan = self.decided();
        let models = self.models();
        let served = models.served.iter().map(|model| {
            let plan = plan.models.iter().find(|plan| plan.name == model.model.name);
            ModelStatus {
                drained: self.router.is_drained(&model.model.name),
                ..of_served(model, &watched, plan)
            }
        });
        let unloaded = models.unloaded.iter();
        let unloaded = unloaded.map(|model| status::of_unloaded(&model.model, &model.why, model.state()));
        Status {
            supervisor: Some(SupervisorStatus::own(self.since, &self.config)),
            host: self.router.host(),
            ready: self.router.ready(),
            upgrading: *self.rising.borrow(),
            models: served.chain(unloaded).collect(),
            gpus: gpus.map(|(index, (gpu, watched))| status::of_gpu(index, &**gpu, watched)).collect(),
        }
    }
}

fn of_served(served: &Served, gpus: &[Watched], plan: Option<&ModelPlan>) -> ModelStatus {
    let mut report = served.report.borrow().clone();
    // The worker that is to take over is shown as a shadow, even if it has a queue of its own.
    let successor = served.successor.iter().flat_map(|successor| successor.borrow().workers.clone());
    report.workers.extend(successor.map(|worker| match worker.role.as_str() {
        "incumbent" => WorkerReport { role: "shadow".to_owned(), ..worker },
        _ => worker,
    }));
    let needs = Needs::of(served, gpus);
    let overload = needs.overload(&served.pipeline.rates());
    let need = Some(needs.into());
    let files_changed = served.files.changed.load(Ordering::Relaxed);
    ModelStatus {
        need,
        overload,
        loaded: LoadedStatus::of(&served.files),
        files_changed,
        ..status::of_model(&served.model, &served.pipeline, &report, gpus, plan)
    }
}

#[derive(Debug, thiserror::Error)]
pub enum BindError {
    #[error("what lies at {0} is in the control socket's way; remove it, or take another run directory")]
    Remove(PathBuf, #[source] io::Error),
    #[error("the control socket {0} cannot be made")]
    Bind(PathBuf, #[source] io::Error),
    #[error("the control socket {0} cannot be protected")]
    Protect(PathBuf, #[source] io::Error),
    #[error("the control socket cannot be opened to others")]
    Admit(#[from] UnknownAccount),
}

/// The bound control socket. Its file goes with it.
#[derive(Debug)]
pub struct Admin {
    listener: Arc<UnixListener>,
    file: Arc<SocketFile>,
    guard: Guard,
}

impl Admin {
    /// Binds the socket in `run_dir`. The caller holds the lock of `run_dir`, so a socket that lies
    /// there belongs to a dead supervisor.
    /// `others` may give orders besides root and this user. A socket that is `inherited` is in use.
    pub fn bind(
        run_dir: &Path,
        others: Option<&Peers>,
        inherited: &mut Inherited,
        refusals: &Arc<Refusals>,
    ) -> Result<Self, BindError> {
        let path = run_dir.join(SOCKET);
        let guard = others.map(|others| Guard::only(others, refusals)).transpose()?;
        let guard = guard.unwrap_or_else(Guard::everybody);
        // The mode lets everybody connect where the lists then let some stay.
        let mode = if others.is_some() { 0o666 } else { 0o600 };
        let failed = |error| BindError::Bind(path.clone(), error);
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

    /// What another supervisor may listen on next.
    pub fn passable(&self) -> Passable {
        Passable::new(SOCKET.to_owned(), &self.listener, Some(&self.file))
    }

    pub async fn run(&self, reach: Arc<Reach>) {
        let places = Arc::new(Semaphore::new(MAX_CONVERSATIONS));
        loop {
            let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
            match self.listener.accept().await {
                Ok((stream, _)) => {
                    // A stream that does not say whose it is is nobody's.
                    let Ok(peer) = Peer::of_unix(&stream) else { continue };
                    if !self.guard.lets(&peer, "connect", SOCKET) {
                        continue;
                    }
                    let reach = Arc::clone(&reach);
                    tokio::spawn(async move {
                        if let Err(error) = converse(stream, &peer, &reach).await {
                            tracing::debug!(%error, "a control conversation broke");
                        }
                        drop(place);
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "the control socket cannot accept");
                    // Out of descriptors, most likely: some come back when any connection ends.
                    tokio::time::sleep(REST).await;
                }
            }
        }
    }
}

/// Makes the socket in the place of one that is in the way.
fn listen(path: &Path, mode: u32) -> Result<UnixListener, BindError> {
    if let Err(error) = std::fs::remove_file(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        return Err(BindError::Remove(path.to_owned(), error));
    }
    let failed = |error| BindError::Bind(path.to_owned(), error);
    let socket = UnixSocket::new_stream().map_err(failed)?;
    socket.bind(path).map_err(failed)?;
    // No client can connect before `listen`; the socket is protected by then.
    protect(path, mode)?;
    socket.listen(BACKLOG).map_err(failed)
}

fn protect(path: &Path, mode: u32) -> Result<(), BindError> {
    let permissions = std::fs::Permissions::from_mode(mode);
    std::fs::set_permissions(path, permissions).map_err(|error| BindError::Protect(path.to_owned(), error))
}

async fn converse(stream: UnixStream, peer: &Peer, reach: &Reach) -> io::Result<()> {
    let (read, mut write) = stream.into_split();
    let mut lines = BufReader::new(read.take(MAX_REQUEST_BYTES));
    let mut line = Vec::new();
    let asked = tokio::time::timeout(ASK_TIMEOUT, lines.read_until(b'\n', &mut line)).await;
    asked.map_err(|_| io::ErrorKind::TimedOut)??;
    let answer = match serde_json::from_slice::<Ask>(&line) {
        Ok(ask) => audited(ask, peer, reach).await,
        Err(error) => Reply::Refused(format!("the request is not understood: {error}")),
    };
    let mut text = serde_json::to_vec(&answer)?;
    text.push(b'\n');
    tokio::time::timeout(READ_TIMEOUT, write.write_all(&text)).await.map_err(|_| io::ErrorKind::TimedOut)?
}

/// Orders leave a line in the log, questions do not.
async fn audited(ask: Ask, peer: &Peer, reach: &Reach) -> Reply {
    let order = ask.order().map(|(action, on)| (action, on.to_owned()));
    let reply = answer(ask, reach).await;
    if let Some((action, on)) = order {
        let outcome = match &reply {
            Reply::Refused(why) => Outcome::Failed(why),
            // Each fault has had its line.
            Reply::Faulty(_) => Outcome::Failed("the configuration has faults"),
            Reply::Handover { report, .. } if report.outcome != "completed" => {
                Outcome::Failed(report.why.as_deref().unwrap_or(&report.outcome))
            }
            _ => Outcome::Done,
        };
        audit(peer, action, &on, outcome);
    }
    reply
}

async fn answer(ask: Ask, reach: &Reach) -> Reply {
    let answered = match ask {
        Ask::Resize { .. } | Ask::Hold { .. } | Ask::Reload | Ask::Move { .. } if *reach.rising.borrow() => {
            Err(WishRefused::Succession.to_string())
        }
        Ask::Status => Ok(Reply::Status(reach.status())),
        Ask::Resize { model, share_percent } => resize(&model, share_percent, reach).await,
        Ask::Hold { model, held } => hold(&model, held, reach).await,
        Ask::Plan => Ok(Reply::Plan(reach.plan())),
        Ask::Reload => reload(reach).await,
        Ask::Move { model, gpu } => place(model, gpu, reach).await,
        Ask::Upgrade => upgrade(reach).await,
        Ask::Drain { model, drained } => drain(model.as_deref(), drained, reach),
    };
    answered.unwrap_or_else(Reply::Refused)
}

fn named(name: &str, reach: &Reach) -> Result<Served, String> {
    let models = reach.models();
    if let Some(model) = models.unloaded.iter().find(|model| model.model.name == name) {
        return Err(format!("model '{name}' does not run: {}", model.why));
    }
    models.served.iter().find(|model| model.model.name == name).cloned().ok_or_else(|| {
        let unloaded = models.unloaded.iter().map(|model| &model.model);
        let all = models.served.iter().map(|model| &model.model).chain(unloaded);
        let names: Vec<_> = all.map(|model| model.name.as_str()).collect();
        format!("there is no model '{name}'; there are: {}", names.join(", "))
    })
}

async fn order<T>(
    name: &str,
    reach: &Reach,
    order: impl FnOnce(oneshot::Sender<T>) -> Order,
) -> Result<T, String> {
    let (reply, outcome) = oneshot::channel();
    let full = |_| format!("too many orders wait for model '{name}'; ask again later");
    named(name, reach)?.orders.try_send(order(reply)).map_err(full)?;
    outcome.await.map_err(|_| ResizeRefused::Stopping.to_string())
}

async fn hold(name: &str, held: bool, reach: &Reach) -> Result<Reply, String> {
    let news = order(name, reach, |reply| Order::Hold { held, reply }).await?;
    Ok(Reply::Held { held, news })
}

fn drain(model: Option<&str>, drained: bool, reach: &Reach) -> Result<Reply, String> {
    if reach.router.host() == Host::Stopping {
        return Err("the supervisor is stopping, and its host stays drained".to_owned());
    }
    if let Some(name) = model {
        named(name, reach)?;
    }
    let news = reach.router.drain(model, drained);
    Ok(Reply::Drained { drained, news })
}

async fn resize(name: &str, share_percent: u32, reach: &Reach) -> Result<Reply, String> {
    let share = Percent::new(share_percent).map_err(|error| error.to_string())?;
    let resize = |reply| Order::Resize { share, groups: None, cause: Cause::Hand, hold: true, reply };
    let acts = reach.controller.acting_policy().is_some();
    match order(name, reach, resize).await? {
        Ok(report) => {
            let held = acts && report.from_sms != report.to_sms;
            Ok(Reply::Handover { report, held })
        }
        Err(refused @ ResizeRefused::InForce { serves, .. }) => {
            Ok(Reply::Unchanged { why: refused.to_string(), held: acts && serves })
        }
        Err(refused) => Err(refused.to_string()),
    }
}

async fn reload(reach: &Reach) -> Result<Reply, String> {
    match command(reach, |reply| Command::Reload { reply }).await? {
        Ok(report) => Ok(Reply::Reloaded(report)),
        Err(ReloadRefused::Faulty(faults)) => Ok(Reply::Faulty(faults)),
        Err(refused) => Err(refused.to_string()),
    }
}

async fn place(model: String, gpu: usize, reach: &Reach) -> Result<Reply, String> {
    let news = command(reach, |reply| Command::Place { model, gpu, reply }).await??;
    Ok(Reply::Placed { gpu, news })
}

/// Waits for what comes of it.
async fn command<T>(reach: &Reach, command: impl FnOnce(oneshot::Sender<T>) -> Command) -> Result<T, String> {
    let (reply, outcome) = oneshot::channel();
    let full = |_| "too many commands wait, or the supervisor is stopping; try again later".to_owned();
    reach.commands.try_send(command(reply)).map_err(full)?;
    outcome.await.map_err(|_| "the supervisor is stopping".to_owned())
}

async fn upgrade(reach: &Reach) -> Result<Reply, String> {
    if *reach.rising.borrow() {
        return Err("an upgrade is under way already".to_owned());
    }
    let (reply, outcome) = oneshot::channel();
    let busy = |_| "an upgrade is under way already, or the supervisor is stopping".to_owned();
    reach.upgrades.try_send(Upgrade { reply }).map_err(busy)?;
    let pid = outcome.await.map_err(|_| "the supervisor is stopping".to_owned())??;
    Ok(Reply::Upgraded { pid })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_is_in_the_sockets_way_is_removed_or_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(SOCKET);
        std::fs::write(&path, "left behind").unwrap();
        let bind = || Admin::bind(folder.path(), None, &mut Inherited::default(), &Arc::default());
        drop(bind().unwrap());
        std::fs::create_dir(&path).unwrap();
        let fault = bind().unwrap_err();
        assert!(matches!(fault, BindError::Remove(named, _) if named == path));
    }
}
