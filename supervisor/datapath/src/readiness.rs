//! The readiness of the host, as load balancers and other clients see it.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};
use shadowslice_config::ReadyConfig;

use crate::router::{HostedModel, Route};

/// The state of the host, which is independent of its models.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HostState {
    #[default]
    Serving,
    /// The host serves requests, but should not receive new ones.
    Drained,
    /// The host is drained and will exit.
    Stopping,
}

/// The rule that decides when the host is ready, the host's state, and the drained models.
#[derive(Debug, Default)]
pub(crate) struct Readiness {
    pub(crate) rule: ReadyConfig,
    pub(crate) host: HostState,
    drained: HashSet<String>,
    /// True after [`Self::is_started`] has returned true once. It never becomes false again.
    started: AtomicBool,
}

impl Readiness {
    /// Returns whether the host's start is complete. The start is complete as soon as no model is
    /// loading (see [`Pipeline::is_loading`](crate::pipeline::Pipeline::is_loading)), and stays
    /// complete. Call this function before `models` changes, because models that are added later do
    /// not count.
    pub(crate) fn is_started(&self, models: &HashMap<String, HostedModel>) -> bool {
        if !models.is_empty()
            && !models.values().filter_map(|model| model.released.as_ref()).any(Route::is_loading)
        {
            self.started.store(true, Ordering::Relaxed);
        }
        self.started.load(Ordering::Relaxed)
    }

    pub(crate) fn is_ready(&self, models: &HashMap<String, HostedModel>) -> bool {
        let serves = |model: &HostedModel| model.released.as_ref().is_some_and(|route| route.ready().is_ok());
        let ready = |(name, model): (&String, &HostedModel)| !self.is_drained(name) && serves(model);
        let host = self.host == HostState::Serving;
        host && match &self.rule {
            ReadyConfig::All => models.iter().all(ready),
            ReadyConfig::Any => self.is_started(models) && models.iter().any(ready),
            ReadyConfig::Each(names) => {
                names.iter().all(|name| models.get_key_value(name).is_some_and(ready))
            }
        }
    }

    /// Sets or clears the drained state of a model, or of the host if `model` is `None`. Returns
    /// whether the state has changed.
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

    /// Removes the drained state of models that no longer exist.
    pub(crate) fn retain(&mut self, is_there: impl Fn(&str) -> bool) {
        self.drained.retain(|name| is_there(name));
    }
}
