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
mod rollout;
mod row;
mod share_request;
mod succession;
mod version_merge;
mod versions;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use crate::controller::{ModelState, Order, ReportedState, VersionRole, shown_name};
use shadowslice_config::ModelConfig;
use shadowslice_datapath::repository::{Availability, ModelListing};
use shadowslice_policy::rollout::RolloutStage;

use client_overrides::ClientOverrides;
use versions::Release;

pub use crate::controller::Served;
pub use instance::{ModelFactory, start_timeout};
pub use needs::Needs;
pub use persisted_state::{PersistedModel, PersistedState};
pub use registry::{MAX_COMMANDS, Registry, StartError, Views};
pub use rollout::{
    BegunRollout, CommandedRollout, ModelRollout, RolloutCommand, RolloutHandle, RolloutOutcome,
    RolloutRequest, stage_name,
};

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
    /// A new version starts beside the released one.
    RollingOut,
}

#[derive(Debug, Default)]
pub struct ModelSet {
    /// The models with workers, in the order of the configuration.
    pub served: Vec<Served>,
    pub unloaded: Vec<Unloaded>,
    /// The changes by clients, by the model's name.
    overrides: BTreeMap<String, ClientOverrides>,
    /// The released versions that the file does not name, by the models' names.
    releases: BTreeMap<String, Release>,
    pub rollouts: Vec<ModelRollout>,
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
    pub role: VersionRole,
    pub why: String,
    /// The last controller, which may still answer accepted requests.
    last: Option<mpsc::Sender<Order>>,
    /// True if the next supervisor serves the model.
    has_moved: bool,
}

impl Unloaded {
    /// Returns the name that operators see.
    pub fn shown_name(&self) -> String {
        shown_name(&self.model, self.role)
    }

    /// Returns the state for `status`.
    pub fn state(&self) -> ReportedState {
        match &self.last {
            _ if self.has_moved => ReportedState::Moved,
            Some(orders) if !orders.is_closed() => ReportedState::Unloading,
            _ => ReportedState::Unloaded,
        }
    }
}

impl ModelSet {
    /// Returns the first model whose new version is not yet released in a rollout.
    pub fn rolling_out(&self) -> Option<&str> {
        let is_unreleased = |rollout: &&ModelRollout| {
            rollout.active.as_ref().is_some_and(|active| active.stage != RolloutStage::Released)
        };
        self.rollouts.iter().find(is_unreleased).map(|rollout| rollout.model.as_str())
    }

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
            let (name, version) = (served.model.served_name().to_owned(), served.model.version.number);
            if state == Availability::Ready && is_drained(&name) {
                let reason =
                    "the model is drained: the server still answers requests, but send no more".to_owned();
                return ModelListing { name, version, state: Availability::Unavailable, reason };
            }
            ModelListing { name, version, state, reason }
        });
        let unloaded = self.unloaded.iter().map(|unloaded| {
            let (state, reason) = match unloaded.state() {
                ReportedState::Moved => (Availability::Ready, String::new()),
                ReportedState::Unloading => (Availability::Unloading, unloaded.why.clone()),
                _ => (Availability::Unavailable, unloaded.why.clone()),
            };
            let model = &unloaded.model;
            let (name, version) = (model.served_name().to_owned(), model.version.number);
            ModelListing { name, version, state, reason }
        });
        served.chain(unloaded).collect()
    }
}
