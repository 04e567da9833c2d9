//! One supervisor takes over from another on the same host, while clients are served.
//!
//! The one that serves starts the next as a process of its own, and gives it its listening sockets
//! and the lock of the run directory. The next one starts workers of its own, and says when its
//! models serve. From then on it accepts the connections, and the first one serves those that it has
//! to their end. Until that moment it can call everything off: nothing has changed then.
//!
//! Both talk over a socket, a JSON document a line.

mod predecessor;
mod successor;

pub(crate) use predecessor::Predecessor;
use successor::Successor;
pub(crate) use successor::program;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot, watch};

use shadowslice_control::backend::{Gpus, MpsEstate};
use shadowslice_control::host::RunDir;
use shadowslice_control::models::{Known, ModelSet};
use shadowslice_datapath::router::Router;
use shadowslice_datapath::sockets::Passable;
use shadowslice_ingress::{Region, SharedMemory};
use shadowslice_operations::admin::Upgrade;

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
    sockets: Vec<(String, RawFd)>,
    #[serde(default)]
    mps: Vec<MpsEstate>,
}

/// What the next one says.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Word {
    /// Each model serves, or there is a reason why it does not.
    Started(BTreeMap<String, Option<String>>),
    /// It ends now.
    Failed(String),
}

/// What the one that serves says last: the next one accepts connections from then on.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Go {
    pub(crate) known: Known,
    pub(crate) regions: Vec<Region>,
}

/// What a supervisor leaves to the next.
pub(crate) struct Succession<'a> {
    pub(crate) program: &'a Path,
    pub(crate) config: &'a Path,
    pub(crate) run_dir: &'a RunDir,
    pub(crate) sockets: Vec<Passable>,
    pub(crate) gpus: &'a Gpus,
    pub(crate) memory: SharedMemory,
    pub(crate) models: watch::Receiver<Arc<ModelSet>>,
    pub(crate) router: &'a Router,
    /// Tells whether the next one is being started: nothing but what it will know may change then.
    pub(crate) rising: watch::Sender<bool>,
    /// How long the models of the next one may take until they serve.
    pub(crate) within: Duration,
}

impl Succession<'_> {
    /// Returns when another supervisor serves: its number, and where to say it. Orders that fail are
    /// answered here. Cancel-safe: a process that does not serve yet is ended.
    pub(crate) async fn next(
        &self,
        orders: &mut mpsc::Receiver<Upgrade>,
    ) -> (u32, oneshot::Sender<Result<u32, String>>) {
        loop {
            let Some(Upgrade { reply }) = orders.recv().await else { std::future::pending().await };
            self.rising.send_replace(true);
            match self.hand_over().await {
                Ok(pid) => return (pid, reply),
                Err(why) => {
                    self.rising.send_replace(false);
                    tracing::error!(why, "no upgrade: this supervisor serves on");
                    reply.send(Err(why)).ok();
                }
            }
        }
    }

    async fn hand_over(&self) -> Result<u32, String> {
        tracing::info!(program = %self.program.display(), "the next supervisor is started");
        let models = Arc::clone(&self.models.borrow());
        let (known, path) = (Known::of(&models, self.router), self.run_dir.known());
        let written = tokio::task::spawn_blocking(move || known.write(&path)).await;
        written.unwrap_or_else(|error| Err(io::Error::other(error))).map_err(|error| {
            format!("what is known of the models cannot be written for the next supervisor: {error}")
        })?;
        let next = Successor::raise(self, &models).await?;
        let known = Known::of(&self.models.borrow(), self.router);
        let pid = next.go(&Go { known, regions: self.memory.regions() }).await?;
        self.gpus.iter().for_each(|gpu| gpu.pass());
        self.sockets.iter().for_each(Passable::pass);
        Ok(pid)
    }
}
