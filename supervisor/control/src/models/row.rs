//! The observed state of a model, as the router, `status` and the planner see it.

use std::sync::Arc;

use shadowslice_config::ModelConfig;
use shadowslice_datapath::router::Route;
use tokio::sync::mpsc;

use super::{MOVED, Unloaded};
use crate::controller::{ModelState, Order, Served, VersionRole};
use crate::process::LoadedFiles;

/// The observed state of a model.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) served_by: ServedBy,
    /// The files of the instance that was created last, which may be the successor.
    pub(super) newest_files: Option<Arc<LoadedFiles>>,
}

/// The part that gets the model's requests.
#[derive(Debug)]
pub(super) enum ServedBy {
    /// Requests are refused. The `last` controller may still answer accepted requests.
    Nobody {
        why: String,
        last: Option<mpsc::Sender<Order>>,
    },
    Workers {
        served: Served,
        route: Route,
    },
    NextSupervisor {
        route: Route,
    },
}

impl Row {
    pub(super) fn served(&self) -> Option<&Served> {
        match &self.served_by {
            ServedBy::Workers { served, .. } => Some(served),
            ServedBy::Nobody { .. } | ServedBy::NextSupervisor { .. } => None,
        }
    }

    pub(super) fn is_unready(&self) -> bool {
        let is_unready = |served: &Served| matches!(served.report.borrow().state, ModelState::Unready { .. });
        self.served().is_some_and(is_unready)
    }

    /// Returns true if the next supervisor serves the model.
    pub(super) fn has_moved(&self) -> bool {
        matches!(self.served_by, ServedBy::NextSupervisor { .. })
    }

    pub(super) fn route(&self) -> Option<&Route> {
        match &self.served_by {
            ServedBy::Nobody { .. } => None,
            ServedBy::Workers { route, .. } | ServedBy::NextSupervisor { route } => Some(route),
        }
    }

    /// Returns the model as `status` shows it if it has no workers here.
    pub(super) fn unloaded(&self, model: &Arc<ModelConfig>, role: VersionRole) -> Option<Unloaded> {
        let (why, last) = match &self.served_by {
            ServedBy::Nobody { why, last } => (why.clone(), last.clone()),
            ServedBy::NextSupervisor { .. } => (MOVED.to_owned(), None),
            ServedBy::Workers { .. } => return None,
        };
        Some(Unloaded { model: Arc::clone(model), role, why, last, has_moved: self.has_moved() })
    }
}
