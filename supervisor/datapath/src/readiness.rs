//! When the host says that it is ready: to load balancers, and to all who look before they send.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};
use shadowslice_config::ReadyConfig;

use crate::router::Route;

/// What is done with the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Host {
    #[default]
    Serving,
    /// It serves, and is to get no more requests.
    Drained,
    /// It is drained, and will end.
    Stopping,
}

#[derive(Debug, Default)]
pub(crate) struct Readiness {
    pub(crate) rule: ReadyConfig,
    pub(crate) host: Host,
    drained: HashSet<String>,
    /// Every model of the start has been ready or given up.
    started: AtomicBool,
}

impl Readiness {
    /// Before `models` change: whether the start is over. Models that are added later do not count.
    pub(crate) fn look(&self, models: &HashMap<String, Route>) -> bool {
        if !models.is_empty() && !models.values().any(|model| model.is_loading()) {
            self.started.store(true, Ordering::Relaxed);
        }
        self.started.load(Ordering::Relaxed)
    }

    pub(crate) fn of(&self, models: &HashMap<String, Route>) -> bool {
        let ready = |(name, model): (&String, &Route)| !self.is_drained(name) && model.ready().is_ok();
        let host = self.host == Host::Serving;
        host && match &self.rule {
            ReadyConfig::All => models.iter().all(ready),
            ReadyConfig::Any => self.look(models) && models.iter().any(ready),
            ReadyConfig::Each(names) => {
                names.iter().all(|name| models.get_key_value(name).is_some_and(ready))
            }
        }
    }

    /// Returns whether that is news.
    pub(crate) fn drain(&mut self, model: Option<&str>, drained: bool) -> bool {
        match (model, self.host) {
            (Some(name), _) if drained => self.drained.insert(name.to_owned()),
            (Some(name), _) => self.drained.remove(name),
            (None, Host::Stopping) => false,
            (None, host) => {
                self.host = if drained { Host::Drained } else { Host::Serving };
                self.host != host
            }
        }
    }

    pub(crate) fn is_drained(&self, model: &str) -> bool {
        self.host != Host::Serving || self.drains(model)
    }

    pub(crate) fn drains(&self, model: &str) -> bool {
        self.drained.contains(model)
    }

    /// Forgets the models that are gone.
    pub(crate) fn keep(&mut self, is_there: impl Fn(&str) -> bool) {
        self.drained.retain(|name| is_there(name));
    }
}
