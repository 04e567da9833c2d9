//! The models: which there are now, and how that changes while they serve.
//!
//! ```text
//! SIGHUP, `reload` ──┐                        ┌─▶ router: what requests reach
//! load, unload ──────┼─▶ Registry ─ publishes ─┼─▶ the models: what status, metrics and orders reach
//! start, `move` ─────┘    │                   └─▶ the planner: what it decides about
//!                         └─ hires controllers, tells them to stop when their last request is answered
//! ```
//!
//! What cannot change in place takes a new `instance::Instance`, which is started beside the old
//! one and takes its place on the router when it is ready; the old one answers what it was given,
//! and goes. So requests of the old form meet workers of the old form, and nothing that is queued
//! moves.

mod by_clients;
mod files;
mod instance;
mod known;
mod load;
mod mended;
mod moves;
mod needs;
mod placing;
mod plan;
mod registry;
mod reload;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot};

use crate::controller::{ModelState, Order};
use shadowslice_config::ModelConfig;
use shadowslice_datapath::repository::ModelListing;

use by_clients::ByClients;

pub use crate::controller::Served;
pub use instance::{MakeError, ModelFactory, patience, serving};
pub use known::{Known, KnownModel};
pub use moves::Move;
pub use needs::Needs;
pub use registry::{Registry, Shown};

/// How many commands, and how many wishes of clients, may wait for the registry.
pub const COMMANDS: usize = 16;

/// What an operator has the registry do.
#[derive(Debug)]
pub enum Command {
    /// Go by the configuration's file, as it is when the registry comes to the command.
    Reload { reply: oneshot::Sender<Result<ReloadReport, ReloadRefused>> },
    /// Have a model that may be anywhere on this GPU. `reply` hears whether that is news.
    Place { model: String, gpu: usize, reply: oneshot::Sender<Result<bool, String>> },
}

/// Why a configuration is not taken over. Then nothing has changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReloadRefused {
    /// It has faults; each is a line.
    #[error("{0}")]
    Faulty(String),
    /// It asks for a change that is not possible while the supervisor runs.
    #[error("{0}")]
    Impossible(String),
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ReloadReport {
    pub file: PathBuf,
    pub models: Vec<ModelChange>,
    pub unchanged: usize,
    /// Keys besides the models' that changed.
    #[serde(default)]
    pub settings: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelChange {
    pub name: String,
    pub change: ChangeKind,
    pub keys: Vec<String>,
    /// Why the change is not in force: a model keeps its earlier state, an added one is unready.
    pub why: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChangeKind {
    Added,
    /// It goes, when it has answered what it accepted.
    Removed,
    /// It is configured otherwise; its worker stays, or hands over to one with another share.
    Changed,
    /// New workers with a queue of their own take over.
    Replaced,
}

impl ChangeKind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Added => "added",
            Self::Removed => "removed",
            Self::Changed => "changed",
            Self::Replaced => "replaced",
        }
    }
}

#[derive(Debug, Default)]
pub struct ModelSet {
    /// As the configuration orders them.
    pub served: Vec<Served>,
    pub unloaded: Vec<Unloaded>,
    /// What clients have changed, by the model's name.
    by_clients: BTreeMap<String, ByClients>,
    pub last_reload: Option<LastReload>,
}

/// How the last reload of the configuration went; the start counts as one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LastReload {
    pub at: SystemTime,
    /// All changes are in force.
    pub succeeded: bool,
}

impl LastReload {
    fn now(succeeded: bool) -> Self {
        Self { at: SystemTime::now(), succeeded }
    }
}

impl ReloadReport {
    /// Returns whether all changes are in force.
    fn is_in_force(&self) -> bool {
        self.models.iter().all(|row| row.why.is_none())
    }
}

#[derive(Debug)]
pub struct Unloaded {
    pub model: Arc<ModelConfig>,
    pub why: String,
    absence: Absence,
}

#[derive(Debug)]
enum Absence {
    /// Its last controller may still answer what it accepted.
    Unloaded { last: Option<mpsc::Sender<Order>> },
    /// The next supervisor answers.
    Moved,
}

impl Unloaded {
    /// As `status` calls it: `unloading` if it still answers requests that it accepted.
    pub fn state(&self) -> &'static str {
        match &self.absence {
            Absence::Unloaded { last: Some(orders) } if !orders.is_closed() => "unloading",
            Absence::Unloaded { .. } => "unloaded",
            Absence::Moved => "moved",
        }
    }
}

impl ModelSet {
    /// The models that clients can load and unload, in Triton's words.
    pub fn listed(&self, is_drained: impl Fn(&str) -> bool) -> Vec<ModelListing> {
        let served = self.served.iter().map(|served| {
            let (state, reason) = match &served.report.borrow().state {
                ModelState::Ready | ModelState::Restarting => ("READY", String::new()),
                // Requests wait, if a worker has served before.
                ModelState::Waiting(why) if served.pipeline.ready().is_ok() => ("READY", why.clone()),
                ModelState::Waiting(why) => ("LOADING", why.clone()),
                ModelState::Loading => ("LOADING", String::new()),
                ModelState::Unready { why, .. } => ("UNAVAILABLE", why.clone()),
                ModelState::Stopping => ("UNLOADING", String::new()),
            };
            let name = served.model.name.clone();
            if state == "READY" && is_drained(&name) {
                let reason =
                    "the model is drained: the server still answers requests, but send no more".to_owned();
                return ModelListing { name, state: "UNAVAILABLE", reason };
            }
            ModelListing { name, state, reason }
        });
        let unloaded = self.unloaded.iter().map(|unloaded| {
            let (state, reason) = match unloaded.state() {
                "moved" => ("READY", String::new()),
                "unloading" => ("UNLOADING", unloaded.why.clone()),
                _ => ("UNAVAILABLE", unloaded.why.clone()),
            };
            ModelListing { name: unloaded.model.name.clone(), state, reason }
        });
        served.chain(unloaded).collect()
    }
}
