//! One supervisor takes over from another on the same host, while clients are served.
//!
//! ```text
//! the one that serves                       the next
//! starts it ── listening sockets, lock ───▶ makes its models, with no worker yet
//!                                           starts the workers of one model
//! passes requests of the model to it, ◀──── says that the model serves
//! ends its own workers ───────────────────▶ ... and so on with each model
//! passes requests to it, as long as         accepts the connections
//! a client is connected here
//! ```
//!
//! Models move one by one, so that a GPU needs memory for one model more, not for all twice. Until
//! the last has moved everything can be called off: then the models come back in the same way.
//!
//! Both talk over a socket, a JSON document a line.

mod predecessor;
mod successor;

pub(crate) use predecessor::{Conversation, Predecessor};
pub(crate) use successor::{Successor, program};

use std::io;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::timeout;

use shadowslice_control::backend::{Gpus, MpsEstate};
use shadowslice_control::controller;
use shadowslice_control::host::RunDir;
use shadowslice_control::models::{ModelSet, PersistedState, Registry, Served};
use shadowslice_datapath::readiness::HostState;
use shadowslice_datapath::router::Router;
use shadowslice_datapath::sockets::PassableSocket;
use shadowslice_ingress::{Region, SharedMemory};
use shadowslice_operations::admin::Upgrade;
use shadowslice_operations::history::History;

/// The number of the descriptor over which a successor talks with its predecessor.
const VARIABLE: &str = "SHADOWSLICE_PREDECESSOR";

/// Of a line, in bytes.
const MAX_LINE: u64 = 16 << 20;

/// What the one that serves gives the next. Later versions may add fields.
#[derive(Debug, Serialize, Deserialize)]
struct Estate {
    run_dir: PathBuf,
    /// Descriptors, as the successor has them.
    lock: RawFd,
    /// Where requests arrive of models that have moved.
    relay: RawFd,
    sockets: Vec<(String, RawFd)>,
    #[serde(default)]
    mps: Vec<MpsEstate>,
}

/// What the next one says.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Word {
    /// The model, which is `described` so, serves, or there is a reason why it does not.
    Serves { model: String, described: Value, why: Option<String> },
    /// There is no further model.
    Started,
    /// It ends now.
    Failed(String),
}

/// What the one that serves answers.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Order {
    /// The next model's workers may start.
    Next,
    /// The model is served here again.
    Drop { model: String },
    /// Nothing is said after it: the next one accepts connections from then on.
    Go(Go),
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Go {
    /// Whether the host is drained, and which models are.
    pub(crate) drained: bool,
    pub(crate) drained_models: Vec<String>,
    pub(crate) regions: Vec<Region>,
}

/// The inputs and outputs of a model, as its workers found them.
fn described(model: &Served) -> Value {
    let metadata = model.pipeline.metadata();
    metadata.and_then(|metadata| serde_json::to_value(&*metadata).ok()).unwrap_or_default()
}

/// What a supervisor leaves to the next.
pub(crate) struct Succession<'a> {
    pub(crate) program: &'a Path,
    pub(crate) config: &'a Path,
    pub(crate) run_dir: &'a RunDir,
    pub(crate) sockets: Vec<PassableSocket>,
    pub(crate) gpus: &'a Gpus,
    pub(crate) memory: SharedMemory,
    pub(crate) models: watch::Receiver<Arc<ModelSet>>,
    pub(crate) router: &'a Router,
    pub(crate) history: &'a Arc<History>,
    pub(crate) registry: Registry,
    /// Tells whether the next one is being started: nothing but what it will know may change then.
    pub(crate) rising: watch::Sender<bool>,
    /// How long a model of the next one may take until it serves.
    pub(crate) within: Duration,
}

impl Succession<'_> {
    /// Returns when another supervisor serves, and where to say it. Orders that fail are answered
    /// here. Dropping the future ends a process that does not serve yet.
    pub(crate) async fn next(
        &self,
        orders: &mut mpsc::Receiver<Upgrade>,
    ) -> (Successor, oneshot::Sender<Result<u32, String>>) {
        loop {
            let Some(Upgrade { reply }) = orders.recv().await else { std::future::pending().await };
            self.rising.send_replace(true);
            match self.hand_over().await {
                Ok(next) => return (next, reply),
                Err(why) => {
                    self.rising.send_replace(false);
                    tracing::error!(why, "the upgrade failed; this supervisor keeps serving");
                    reply.send(Err(why)).ok();
                }
            }
        }
    }

    async fn hand_over(&self) -> Result<Successor, String> {
        // A model that is loaded, reloaded or moved now would change behind the next supervisor's back.
        let _no_commands = self.registry.pause_commands(self.within).await?;
        self.settled().await?;
        tracing::info!(program = %self.program.display(), "starting the next supervisor");
        let models = Arc::clone(&self.models.borrow());
        let (state, path) = (PersistedState::of(&models, self.router), self.run_dir.state());
        let written = tokio::task::spawn_blocking(move || state.write(&path)).await;
        written
            .unwrap_or_else(|error| Err(io::Error::other(error)))
            .map_err(|error| format!("cannot write the models' state for the next supervisor: {error}"))?;
        let mut next = Successor::start(self).await?;
        let mut moved = Vec::new();
        let taken_over = async {
            self.move_all(&mut next, &models, &mut moved).await?;
            self.leave_history().await;
            next.go(self.go(&models)).await
        };
        if let Err(why) = taken_over.await {
            self.take_back(next, moved).await;
            return Err(why);
        }
        self.registry.stay_moved();
        self.gpus.iter().for_each(|gpu| gpu.pass());
        self.sockets.iter().for_each(PassableSocket::release);
        Ok(next)
    }

    /// Waits until no change of a share is in progress, which the next supervisor would not know.
    async fn settled(&self) -> Result<(), String> {
        let models = Arc::clone(&self.models.borrow());
        for served in &models.served {
            // The report may be older than a change that has just begun.
            let unchanging = async {
                let (done, is_done) = oneshot::channel();
                // An error here or below means that the controller has ended.
                served.orders.send(controller::Order::AwaitChange { done }).await.ok();
                is_done.await.ok();
            };
            timeout(self.within, unchanging).await.map_err(|_| {
                format!(
                    "the share of model '{}' was still changing after {:?}; try again",
                    served.model.name, self.within
                )
            })?;
        }
        Ok(())
    }

    async fn leave_history(&self) {
        let (history, file) = (Arc::clone(self.history), self.run_dir.history());
        let left = tokio::task::spawn_blocking(move || history.leave(&file)).await;
        if let Ok(Err(error)) = left {
            tracing::warn!(
                %error,
                "cannot write the history for the next supervisor; the charts of its page start empty"
            );
        }
    }

    fn go(&self, models: &ModelSet) -> Go {
        let names = models.served.iter().map(|served| &served.model.name);
        Go {
            drained: self.router.host() == HostState::Drained,
            drained_models: names.filter(|name| self.router.is_model_drained(name)).cloned().collect(),
            regions: self.memory.regions(),
        }
    }

    /// Has each model that serves in the next one served there, one after the other.
    async fn move_all(
        &self,
        next: &mut Successor,
        models: &ModelSet,
        moved: &mut Vec<String>,
    ) -> Result<(), String> {
        loop {
            match next.hear(self.within, !moved.is_empty()).await? {
                Word::Serves { model, described: there, why } => {
                    let here = models.served.iter().find(|served| served.model.name == model);
                    match (here, why) {
                        (Some(here), Some(why)) if here.pipeline.ready().is_ok() => {
                            return Err(format!(
                                "model '{model}' is ready here, but not in the next supervisor: {why}"
                            ));
                        }
                        // Requests are checked here, so that both must take the same ones.
                        (Some(here), None) if described(here) == there => {
                            moved.push(model.clone());
                            let socket = next.relay();
                            tokio::select! {
                                () = self.registry.relay(&model, socket) => {}
                                why = next.lost() => return Err(why),
                            }
                        }
                        (Some(_), why) => {
                            tracing::info!(
                                model,
                                why,
                                "the model differs or is not ready in the next supervisor; this supervisor keeps the model's workers for its connected clients"
                            );
                        }
                        (None, _) => {}
                    }
                    next.say(&Order::Next).await?;
                }
                Word::Started => return Ok(()),
                Word::Failed(why) => {
                    next.ends().await;
                    return Err(format!("the next supervisor failed to start: {why}"));
                }
            }
        }
    }

    /// Takes the models back: one after the other while the next supervisor serves the others, and all
    /// together if it has exited.
    async fn take_back(&self, mut next: Successor, mut moved: Vec<String>) {
        while next.lives()
            && let Some(model) = moved.pop()
        {
            self.registry.take_back(std::slice::from_ref(&model), false).await;
            next.say(&Order::Drop { model }).await.ok();
        }
        self.registry.take_back(&moved, true).await;
        next.end().await;
    }
}
