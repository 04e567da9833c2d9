//! The models: their desired state, and the reconcilers that bring it about.
//!
//! ```text
//! reload, load, unload, move, changed files,      ┌─▶ router: the models that requests reach
//! placement, upgrade                              ├─▶ status, metrics
//!    │ change the desired state                   ├─▶ planner: the models to decide about
//!    ▼                                            │ publish
//! Registry ── goal of a model ─▶ Reconciler ── observed state ─▶ Registry
//!    ▲                             │   ▲
//!    └── ticket: outcome ──────────┘   └─ report of the model's controller
//! ```
//!
//! A command never starts a worker itself, and no model waits for another model. If a change needs new
//! workers, the reconciler starts a second instance with a queue of its own, sends the requests to it
//! when it is ready, and retires the first one. So requests that were checked against the former
//! configuration are answered by workers with that configuration.

mod client_overrides;
mod config_diff;
mod desired;
mod file_reader;
mod file_watch;
mod instance;
mod load;
mod needs;
mod persisted_state;
mod placement;
mod reconciler;
mod registry;
mod reload;
mod row;
mod share_change;
mod succession;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use crate::controller::{ModelState, Order, ReportedState};
use shadowslice_config::ModelConfig;
use shadowslice_datapath::repository::{Availability, ModelListing};

use client_overrides::ClientOverrides;

pub use crate::controller::Served;
pub use instance::{ModelFactory, start_timeout};
pub use needs::Needs;
pub use persisted_state::{PersistedModel, PersistedState};
pub use registry::{MAX_COMMANDS, Registry, StartError, Views};

const MOVED: &str = "the next supervisor serves the model";

/// The reason why a reload has changed nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReloadRefused {
    /// The configuration has faults. Each line describes one of them.
    #[error("{0}")]
    Faulty(String),
    /// The reload is not possible now, or a changed key needs a restart.
    #[error("{0}")]
    Impossible(String),
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ReloadReport {
    pub file: PathBuf,
    pub models: Vec<ModelChange>,
    pub unchanged: usize,
    /// The changed keys that belong to no model.
    #[serde(default)]
    pub settings: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelChange {
    pub name: String,
    pub change: ChangeKind,
    pub keys: Vec<String>,
    /// The reason why the change is not in force. The model keeps its earlier state, or is unready if it
    /// was added.
    pub why: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChangeKind {
    Added,
    /// The model's workers exit when they have answered all accepted requests.
    Removed,
    /// The model's workers continue, or hand over to a worker with another share.
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
    /// The models with workers, in the order of the configuration.
    pub served: Vec<Served>,
    pub unloaded: Vec<Unloaded>,
    /// The changes by clients, by the model's name.
    overrides: BTreeMap<String, ClientOverrides>,
    pub last_reload: Option<LastReload>,
}

/// The outcome of the last reload. The start of the supervisor counts as a reload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LastReload {
    pub at: SystemTime,
    /// True if all changes are in force.
    pub succeeded: bool,
}

impl LastReload {
    /// Returns the time of the reload, in seconds since 1970.
    pub fn at_s(&self) -> f64 {
        self.at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
    }

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
    /// The last controller may still answer accepted requests.
    Unloaded { last: Option<mpsc::Sender<Order>> },
    /// The next supervisor serves the model.
    Moved,
}

impl Unloaded {
    /// Returns the state for `status`.
    pub fn state(&self) -> ReportedState {
        match &self.absence {
            Absence::Unloaded { last: Some(orders) } if !orders.is_closed() => ReportedState::Unloading,
            Absence::Unloaded { .. } => ReportedState::Unloaded,
            Absence::Moved => ReportedState::Moved,
        }
    }
}

impl ModelSet {
    /// Returns the models that clients can load and unload, in Triton's terms.
    pub fn listed(&self, is_drained: impl Fn(&str) -> bool) -> Vec<ModelListing> {
        let served = self.served.iter().map(|served| {
            let (state, reason) = match &served.report.borrow().state {
                ModelState::Ready | ModelState::Restarting => (Availability::Ready, String::new()),
                // Requests wait if a worker has served before.
                ModelState::Waiting(why) if served.pipeline.ready().is_ok() => {
                    (Availability::Ready, why.clone())
                }
                ModelState::Waiting(why) => (Availability::Loading, why.clone()),
                ModelState::Loading => (Availability::Loading, String::new()),
                ModelState::Unready { why, .. } => (Availability::Unavailable, why.clone()),
                ModelState::Stopping => (Availability::Unloading, String::new()),
            };
            let name = served.model.name.clone();
            if state == Availability::Ready && is_drained(&name) {
                let reason =
                    "the model is drained: the server still answers requests, but send no more".to_owned();
                return ModelListing { name, state: Availability::Unavailable, reason };
            }
            ModelListing { name, state, reason }
        });
        let unloaded = self.unloaded.iter().map(|unloaded| {
            let (state, reason) = match unloaded.state() {
                ReportedState::Moved => (Availability::Ready, String::new()),
                ReportedState::Unloading => (Availability::Unloading, unloaded.why.clone()),
                _ => (Availability::Unavailable, unloaded.why.clone()),
            };
            ModelListing { name: unloaded.model.name.clone(), state, reason }
        });
        served.chain(unloaded).collect()
    }
}
