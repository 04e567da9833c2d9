//! Commands of clients to load and unload models.

use std::sync::Arc;

use shadowslice_config::{self as config, ModelConfig};
use shadowslice_datapath::peer;
use shadowslice_datapath::repository::{ModelCommand, ModelCommandError, QueuedCommand};
use tokio::sync::mpsc;

use super::config_diff;
use super::desired::{DesiredPresence, PendingOutcome};
use super::registry::{Entry, Registry};
use crate::process::FileStamps;

pub(super) const UNLOADED: &str = "unloaded by a client";

const NOT_READY: &str = "the model was loaded, but did not become ready";

/// A load that waits for its outcome.
struct Load {
    ticket: PendingOutcome,
    /// The configuration of the load.
    loads: Arc<ModelConfig>,
    /// The configuration before the load, if the model was not loaded.
    unloaded_before: Option<Arc<ModelConfig>>,
}

impl Registry {
    /// Executes the commands of clients, each in a task of its own. Never returns.
    pub async fn serve_clients(&self, mut commands_rx: mpsc::Receiver<QueuedCommand>) {
        while let Some(queued) = commands_rx.recv().await {
            let registry = self.clone();
            tokio::spawn(async move { registry.execute(queued).await });
        }
        std::future::pending().await
    }

    /// Executes a command and writes its audit message. The client may have disconnected before the
    /// outcome is known.
    async fn execute(&self, QueuedCommand { command, by, reply_tx }: QueuedCommand) {
        let outcome = match &command {
            ModelCommand::Load { model, config } => {
                tracing::info!(model, config, "a client loads a model");
                self.load_versions(model, config.as_deref()).await
            }
            ModelCommand::Unload { model } => self.unload_versions(model).await,
        };
        let (action, model) = command.action_and_model();
        let audited = outcome.clone().map_err(|why| why.to_string());
        peer::audit(&by, action, model, (&audited).into());
        // The receiver may be gone.
        reply_tx.send(outcome).ok();
    }

    async fn load_versions(&self, model: &str, json: Option<&str>) -> Result<(), ModelCommandError> {
        for name in self.versions_of("load", model)? {
            self.load(&name, json).await?;
        }
        Ok(())
    }

    async fn unload_versions(&self, model: &str) -> Result<(), ModelCommandError> {
        for name in self.versions_of("unload", model)? {
            self.unload(&name, UNLOADED).await?;
        }
        Ok(())
    }

    /// Returns the names of the instances of a model for a command that concerns all of them.
    fn versions_of(&self, command: &'static str, model: &str) -> Result<Vec<String>, ModelCommandError> {
        let table = self.table();
        if table.rollout(model).is_some() {
            let why =
                "a rollout is in progress, or its former version is kept; promote it or roll it back first";
            return Err(ModelCommandError::Failed(model.to_owned(), why.to_owned()));
        }
        let entries = table.entries().iter().filter(|entry| entry.served_name == model);
        let names: Vec<String> = entries.map(|entry| entry.name.clone()).collect();
        if names.is_empty() {
            return Err(ModelCommandError::Unknown(command, model.to_owned()));
        }
        Ok(names)
    }

    /// Unloads an instance. Returns when the router has no route to it.
    pub async fn unload(&self, name: &str, why: &'static str) -> Result<(), ModelCommandError> {
        let _permit = self.begin_command().map_err(|_| ModelCommandError::Busy)?;
        let ticket = {
            let table = self.table();
            let Some(entry) = table.instance(name) else {
                return Err(ModelCommandError::Unknown("unload", name.to_owned()));
            };
            PendingOutcome::change(&entry.goal, |desired, _| {
                desired.presence = DesiredPresence::Unloaded { why, is_removed: false };
            })
        };
        ticket.outcome().await.map_err(|why| ModelCommandError::Failed(name.to_owned(), why))
    }

    /// Loads an instance, or loads it again. Its files are read, and `json` overrides its configuration.
    pub(super) async fn load(&self, name: &str, json: Option<&str>) -> Result<(), ModelCommandError> {
        let _permit = self.begin_command().map_err(|_| ModelCommandError::Busy)?;
        let Load { ticket, loads, unloaded_before } = self.begin_load(name, json).await?;
        let failed = |why: String| ModelCommandError::Failed(name.to_owned(), why);
        let outcome = ticket.outcome().await;
        let served_name = {
            let table = self.table();
            let entry = table.instance(name).filter(|entry| entry.is_to_be_served());
            entry.map(|entry| entry.served_name.clone())
        };
        match (outcome, served_name) {
            (Ok(()), Some(model)) => {
                self.undrain(&model);
                if let Some(json) = json {
                    let mut table = self.table();
                    if let Some(entry) = table.instance_mut(name) {
                        entry.overrides.add(json);
                    }
                    self.publish(&table);
                }
                Ok(())
            }
            (Ok(()), None) => Err(failed("another command unloaded the model".to_owned())),
            (Err(why), _) => {
                if let Some(before) = unloaded_before {
                    self.give_up_load(name, &loads, &before).await;
                }
                Err(failed(why))
            }
        }
    }

    /// Changes the desired state so that the model is loaded with its files as they are now.
    async fn begin_load(&self, name: &str, json: Option<&str>) -> Result<Load, ModelCommandError> {
        let _turn = self.0.reading.lock().await;
        let failed = |why: String| ModelCommandError::Failed(name.to_owned(), why);
        let unknown = || ModelCommandError::Unknown("load", name.to_owned());
        let (config, written) = {
            let table = self.table();
            (table.desired_config(), table.written(name).ok_or_else(unknown)?)
        };
        let changes = json.unwrap_or("{}").to_owned();
        let read = move || {
            let model = config::apply_client_changes(&config, &written, &changes)?;
            let stamps = FileStamps::of(&model);
            Ok((model, stamps))
        };
        let read = self.0.files.lock().await.read(read).await.map_err(failed)?;
        let (model, stamps): (ModelConfig, FileStamps) = read.map_err(ModelCommandError::Invalid)?;
        if let Some(why) = model.broken {
            return Err(failed(why));
        }
        let table = self.table();
        let first = self.first_share(&table, &model);
        let entry = table.instance(name).ok_or_else(unknown)?;
        let unloaded_before = (!entry.is_to_be_served()).then(|| entry.model());
        let policy_acts = table.config.controller.acting_policy().is_some();
        let loads = Arc::new(model);
        let has_these_files = entry.row.newest_files.as_ref().is_none_or(|files| files.stamps() == stamps);
        let ticket = PendingOutcome::change(&entry.goal, |desired, is_settled| {
            let is_served = matches!(desired.presence, DesiredPresence::Served { .. });
            let is_same = has_these_files && config_diff::change(&desired.spec.model, &loads).is_none();
            let is_starting = !is_settled && is_served && is_same;
            desired.reconfigure((*loads).clone(), policy_acts, is_settled);
            // Even if no key differs, a load reads the model's files again. If workers are already
            // starting with these files, the load waits for them.
            desired.spec.load += u64::from(!is_starting);
            if !is_served {
                desired.presence = DesiredPresence::Served { first, relay_is_lost: false };
            }
        });
        Ok(Load { ticket, loads, unloaded_before })
    }

    /// Unloads a model that a client has loaded without success. The next load starts from the
    /// configuration `before`. If another command has changed the configuration meanwhile, that command
    /// counts.
    async fn give_up_load(&self, name: &str, loads: &ModelConfig, before: &Arc<ModelConfig>) {
        let ticket = {
            let table = self.table();
            let is_own = |entry: &&Entry| config_diff::change(&entry.model(), loads).is_none();
            table.instance(name).filter(is_own).map(|entry| {
                PendingOutcome::change(&entry.goal, |desired, _| {
                    desired.spec.model = Arc::clone(before);
                    desired.presence = DesiredPresence::Unloaded { why: NOT_READY, is_removed: false };
                })
            })
        };
        if let Some(ticket) = ticket {
            // Nothing can fail about ending workers.
            ticket.outcome().await.ok();
        }
    }
}
