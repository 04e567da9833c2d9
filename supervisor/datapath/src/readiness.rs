//! The host's readiness, as load balancers and other clients see it.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};
use shadowslice_config::Ready;

use crate::router::Route;

/// The state of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HostState {
    #[default]
    Serving,
    /// The host serves, but should get no more requests.
    Drained,
    /// The host is drained and will end.
    Stopping,
}

/// The rule for the host's readiness, and the drained models.
#[derive(Debug, Default)]
pub(crate) struct Readiness {
    pub(crate) rule: Ready,
    pub(crate) host: HostState,
    drained: HashSet<String>,
    /// True once every model of the start has been ready or given up.
    started: AtomicBool,
}

impl Readiness {
    /// Returns whether the start is over. Call this before `models` change: models that are added
    /// later do not count.
    pub(crate) fn is_started(&self, models: &HashMap<String, Route>) -> bool {
        if !models.is_empty() && !models.values().any(|model| model.is_loading()) {
            self.started.store(true, Ordering::Relaxed);
        }
        self.started.load(Ordering::Relaxed)
    }

    pub(crate) fn is_ready(&self, models: &HashMap<String, Route>) -> bool {
        let ready = |(name, model): (&String, &Route)| !self.is_drained(name) && model.ready().is_ok();
        let host = self.host == HostState::Serving;
        host && match &self.rule {
            Ready::All => models.iter().all(ready),
            Ready::Any => self.is_started(models) && models.iter().any(ready),
            Ready::Each(names) => names.iter().all(|name| models.get_key_value(name).is_some_and(ready)),
        }
    }

    /// Drains a model or the host, or ends that. Returns whether the state has changed.
    pub(crate) fn set_drained(&mut self, model: Option<&str>, drained: bool) -> bool {
        match (model, self.host) {
            (Some(name), _) if drained => self.drained.insert(name.to_owned()),
            (Some(name), _) => self.drained.remove(name),
            (None, HostState::Stopping) => false,
            (None, host) => {
                self.host = if drained { HostState::Drained } else { HostState::Serving };
                self.host != host
            }
        }
    }

    pub(crate) fn is_drained(&self, model: &str) -> bool {
        self.host != HostState::Serving || self.is_model_drained(model)
    }

    pub(crate) fn is_model_drained(&self, model: &str) -> bool {
        self.drained.contains(model)
    }

    /// Keeps the drained state only of the models that still exist.
    pub(crate) fn retain(&mut self, is_there: impl Fn(&str) -> bool) {
        self.drained.retain(|name| is_there(name));
    }
}
