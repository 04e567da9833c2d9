//! Models move to the next supervisor one by one, and back if the upgrade fails.

use std::path::Path;
use std::sync::Arc;

use shadowslice_config::ModelConfig;
use shadowslice_datapath::repository::ModelCommandError;

use super::desired::{DesiredModel, DesiredPresence, PendingOutcome};
use super::registry::{Entry, ModelTable, Registry};
use crate::controller::Served;

impl Registry {
    /// Returns the models that the previous supervisor serves, in the order of the configuration.
    pub fn not_started(&self) -> Vec<Arc<ModelConfig>> {
        let table = self.table();
        table.entries().iter().filter(|entry| entry.is_not_started()).map(Entry::model).collect()
    }

    /// Starts a model of a supervisor that takes over, and waits until it serves. Returns the model's
    /// parts, or `None` if the configuration does not contain the model or the model cannot be created.
    /// A model without workers has the reason in its report.
    pub async fn begin(&self, name: &str) -> (Option<Served>, Result<(), String>) {
        let ticket = {
            let table = self.table();
            table.instance(name).map(|entry| serve(&table, self, entry, false))
        };
        let outcome = match ticket {
            Some(ticket) => ticket.outcome().await,
            None => Err("the configuration does not contain the model".to_owned()),
        };
        let served = self.table().instance(name).and_then(|entry| entry.row.served().cloned());
        (served, outcome)
    }

    /// Starts all models that have not been started, without waiting.
    pub fn begin_all(&self) {
        let table = self.table();
        table.entries().iter().filter(|entry| entry.is_not_started()).for_each(|entry| {
            serve(&table, self, entry, false);
        });
    }

    /// Sends the requests of a model to the supervisor at this socket. Returns when the model's workers
    /// here have exited.
    pub async fn relay(&self, name: &str, socket: Arc<Path>) {
        let ticket = self.table().instance(name).map(|entry| {
            PendingOutcome::change(&entry.goal, |desired, _| {
                desired.presence = DesiredPresence::Relayed { socket, returns: true };
            })
        });
        if let Some(ticket) = ticket {
            // A relay that cannot be set up leaves the model where it is.
            ticket.outcome().await.ok();
        }
    }

    /// Starts workers of models that have moved. Returns when each of them serves or has failed. If
    /// `relay_is_lost`, nobody serves the models, and their requests wait for the workers here.
    pub async fn take_back(&self, names: &[String], relay_is_lost: bool) {
        let tickets: Vec<_> = {
            let table = self.table();
            let entries = names.iter().filter_map(|name| table.instance(name));
            let moved = entries.filter(|entry| entry.row.has_moved());
            moved.map(|entry| serve(&table, self, entry, relay_is_lost)).collect()
        };
        for ticket in tickets {
            // If the model does not serve, its own state says why.
            ticket.outcome().await.ok();
        }
    }

    /// Records that models that have moved never come back.
    pub fn stay_moved(&self) {
        for entry in self.table().entries() {
            entry.goal.send_if_modified(|goal| {
                let mut is_changed = false;
                goal.amend(|DesiredModel { presence, .. }| {
                    if let DesiredPresence::Relayed { returns, .. } = presence {
                        is_changed = std::mem::replace(returns, false);
                    }
                });
                is_changed
            });
        }
    }

    /// Unloads a model because the previous supervisor serves it again.
    pub async fn give_back(&self, name: &str) -> Result<(), ModelCommandError> {
        self.unload(name, "the previous supervisor serves the model again").await
    }
}

/// Makes the workers of this supervisor serve a model.
fn serve(table: &ModelTable, registry: &Registry, entry: &Entry, relay_is_lost: bool) -> PendingOutcome {
    let otherwise = registry.first_share(table, &entry.model());
    PendingOutcome::change(&entry.goal, |desired, _| {
        let first = match desired.presence {
            DesiredPresence::NotStarted { first } => first,
            _ => otherwise,
        };
        desired.presence = DesiredPresence::Served { first, relay_is_lost };
    })
}

impl Entry {
    fn is_not_started(&self) -> bool {
        matches!(self.goal.borrow().desired().presence, DesiredPresence::NotStarted { .. })
    }
}
