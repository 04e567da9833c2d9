//! A reload of the configuration. The file is read and checked as a whole and compared with the
//! desired state of the models, which it then replaces.

use std::collections::HashSet;
use std::sync::Arc;

use shadowslice_config as config;
use shadowslice_config::{Config, ConfigError, FaultList, ModelConfig};
use shadowslice_shared::errors;

use super::client_overrides::ClientOverrides;
use super::config_diff::{self, ConfigDiff, ModelDiff};
use super::desired::{DesiredModel, DesiredPresence, InstanceSpec, PendingOutcome};
use super::registry::{ModelTable, Registry};
use super::version_merge::{MergedConfig, RequiredRollout, RunningModel, merge};
use super::{ChangeKind, LastReload, ModelChange, ReloadRefused, ReloadReport};

/// A change of one model that waits for its outcome.
pub(super) struct PendingChange {
    change: ModelChange,
    ticket: Option<PendingOutcome>,
}

impl Registry {
    /// Reads the configuration file, and changes the models accordingly. A file with faults, or with a
    /// change that needs a restart, changes nothing.
    ///
    /// # Errors
    ///
    /// Returns the reason why nothing was changed.
    pub async fn reload(&self) -> Result<ReloadReport, ReloadRefused> {
        let _permit = self.begin_command().map_err(ReloadRefused::Impossible)?;
        let outcome = match self.begin_reload().await {
            Ok((report, pending)) => Ok(ReloadReport { models: outcomes(pending).await, ..report }),
            Err(refused) => Err(refused),
        };
        log(&outcome);
        let succeeded = outcome.as_ref().is_ok_and(ReloadReport::is_in_force);
        let mut table = self.table();
        table.last_reload = LastReload::now(succeeded);
        self.publish(&table);
        outcome
    }

    /// Changes the desired states. Returns the report without the models, and their changes.
    async fn begin_reload(&self) -> Result<(ReloadReport, Vec<PendingChange>), ReloadRefused> {
        let _turn = self.0.reading.lock().await;
        let (MergedConfig { config, rollouts, written }, mut changed_files) = self.read_config().await?;
        // A model that gets another version does not need its present files again.
        changed_files.retain(|name| !rollouts.iter().any(|required| required.replaces(name)));
        let (mut report, mut pending) = self.change_desired(config, &changed_files, &rollouts)?;
        self.table().adopt(&written);
        for required in rollouts {
            let is_counted = pending.iter().any(|change| change.change.name == required.model);
            report.unchanged = report.unchanged.saturating_sub(usize::from(!is_counted));
            pending.push(self.begin_required(required).await);
        }
        Ok((report, pending))
    }

    /// Changes the desired states, but for versions that must be rolled out.
    fn change_desired(
        &self,
        config: Config,
        changed_files: &HashSet<String>,
        rollouts: &[RequiredRollout],
    ) -> Result<(ReloadReport, Vec<PendingChange>), ReloadRefused> {
        let mut table = self.table();
        let is_busy = |required: &&RequiredRollout| table.rollout(&required.model).is_some();
        if let Some(RequiredRollout { model, .. }) = rollouts.iter().find(is_busy) {
            return Err(ReloadRefused::Impossible(format!(
                "a rollout of model '{model}' is in progress; run `shadowslice promote {model}` or `shadowslice \
                 rollback {model}` before you change its path"
            )));
        }
        let config = self.placed(&table, config, |name| table.instance(name).map(|entry| entry.model().gpu));
        let diff = diff(&table, &config, changed_files)?;
        self.0.factory.find_library(&config).map_err(ReloadRefused::Impossible)?;
        for note in &config.notes {
            tracing::warn!(%note, "the configuration is valid, but you should correct one setting");
        }
        let begun = self.apply(&mut table, &config, diff);
        Ok(begun)
    }

    /// Starts a rollout that a changed path requires.
    async fn begin_required(&self, required: RequiredRollout) -> PendingChange {
        let RequiredRollout { model, candidate, config, written } = required;
        let begun = self.start_version(&model, candidate, config).await;
        if begun.is_ok() {
            self.table().require(&model, written);
        }
        let mut change = PendingChange::new(&model, ChangeKind::RollingOut, &["path"], None);
        change.change.why = begun.err();
        change
    }

    /// Reads the file. Also returns the names of models whose files are not those that were loaded.
    async fn read_config(&self) -> Result<(MergedConfig, HashSet<String>), ReloadRefused> {
        let (file, loaded, running) =
            (self.0.file.clone(), self.newest_files(), RunningModel::all(&self.table()));
        let read = move || {
            let changed = loaded.iter().filter(|(_, files)| files.have_changed());
            let changed = changed.map(|(name, _)| name.clone()).collect();
            (config::load_here(&file).map(|config| merge(config, &running)), changed)
        };
        let read = self.0.files.lock().await.read(read).await;
        let (config, changed) = read.map_err(ReloadRefused::Impossible)?;
        let merged = config.map_err(|error| ReloadRefused::Faulty(faults(&error)))?;
        let faults = [&merged.config.file_faults[..], &merged.config.host_faults].concat();
        if !faults.is_empty() {
            return Err(ReloadRefused::Faulty(FaultList(&faults).to_string()));
        }
        Ok((merged, changed))
    }

    /// Changes the desired states.
    fn apply(
        &self,
        table: &mut ModelTable,
        config: &Config,
        diff: ConfigDiff,
    ) -> (ReloadReport, Vec<PendingChange>) {
        let sampled = diff.sample.map(|sample| self.set_sample(table, sample)).map(|()| "tracing.sample");
        let ready = diff.ready.map(|rule| self.set_ready_rule(table, rule)).map(|()| "ready");
        let settings = [sampled, ready].into_iter().flatten().map(str::to_owned).collect();
        let mut models = Vec::new();
        for name in diff.removed {
            self.remove(table, &name);
            models.push(PendingChange::new(&name, ChangeKind::Removed, &[], None));
        }
        for change in &diff.changed {
            models.extend(self.change(table, change));
        }
        for model in diff.added {
            let name = model.name.clone();
            let ticket = self.add_from_file(table, model);
            models.push(PendingChange::new(&name, ChangeKind::Added, &[], Some(ticket)));
        }
        table.set_written(config);
        self.publish(table);
        let removed = models.iter().filter(|model| model.change.change == ChangeKind::Removed).count();
        let unchanged = config.models.len().saturating_sub(models.len() - removed);
        let file = self.0.file.clone();
        (ReloadReport { file, models: Vec::new(), unchanged, settings }, models)
    }

    fn add_from_file(&self, table: &mut ModelTable, model: ModelConfig) -> PendingOutcome {
        let first = self.first_share(table, &model);
        let presence = DesiredPresence::Served { first, relay_is_lost: false };
        let spec = InstanceSpec { model: Arc::new(model), load: 0 };
        let desired = DesiredModel { spec, presence, share: None };
        let reconciler = self.add(table, desired, ClientOverrides::default());
        let ticket = reconciler.ticket();
        self.spawn(reconciler.run());
        ticket
    }

    /// Changes the desired state of one model. Its workers continue if the change allows that and the
    /// model is not unready. Otherwise, new workers replace them.
    pub(super) fn change(&self, table: &ModelTable, diff: &ModelDiff) -> Option<PendingChange> {
        let policy_acts = table.config.controller.acting_policy().is_some();
        let entry = table.instance(&diff.model.name)?;
        let is_served = entry.is_to_be_served();
        let loads_again = is_served && (diff.reads_its_files() || entry.is_failing());
        let needs_workers = loads_again || is_served && !diff.needs_workers.is_empty();
        let ticket = PendingOutcome::change(&entry.goal, |desired, is_settled| {
            desired.reconfigure(diff.model.clone(), policy_acts, is_settled);
            desired.spec.load += u64::from(loads_again);
        });
        let kind = if needs_workers { ChangeKind::Replaced } else { ChangeKind::Changed };
        Some(PendingChange::new(&diff.model.name, kind, &diff.keys(), Some(ticket)))
    }
}

impl PendingChange {
    fn new(name: &str, change: ChangeKind, keys: &[&str], ticket: Option<PendingOutcome>) -> Self {
        let keys = keys.iter().map(|key| (*key).to_owned()).collect();
        Self { change: ModelChange { name: name.to_owned(), change, keys, why: None }, ticket }
    }
}

/// Waits for the outcomes of all changes.
pub(super) async fn outcomes(pending: Vec<PendingChange>) -> Vec<ModelChange> {
    let mut changes = Vec::new();
    for PendingChange { change, ticket } in pending {
        let why = match ticket {
            Some(ticket) => ticket.outcome().await.err(),
            None => change.why.clone(),
        };
        changes.push(ModelChange { why, ..change });
    }
    changes
}

/// Compares a new configuration with the desired one. Models with changed files and models that fail
/// also count as changed.
fn diff(
    table: &ModelTable,
    config: &Config,
    changed_files: &HashSet<String>,
) -> Result<ConfigDiff, ReloadRefused> {
    let mut diff = config_diff::compare(&table.desired_config(), config)
        .map_err(|fixed| ReloadRefused::Impossible(fixed.to_string()))?;
    let differs: HashSet<_> = diff.changed.iter().map(|change| change.model.name.clone()).collect();
    for change in diff.changed.iter_mut().filter(|change| changed_files.contains(&change.model.name)) {
        change.reads_files();
    }
    let is_again = |model: &&ModelConfig| {
        let is_failing = || table.instance(&model.name).is_some_and(|entry| entry.is_failing());
        !differs.contains(&model.name) && (changed_files.contains(&model.name) || is_failing())
    };
    diff.changed.extend(config.models.iter().filter(is_again).map(ModelDiff::again));
    Ok(diff)
}

/// Returns the faults of a configuration file, one in each line, as `check` prints them.
fn faults(error: &ConfigError) -> String {
    match error {
        ConfigError::Faults(_) => error.to_string(),
        ConfigError::Read { .. } => errors::chain(error),
    }
}

fn log(outcome: &Result<ReloadReport, ReloadRefused>) {
    match outcome {
        Ok(ReloadReport { models, unchanged, settings, .. }) => {
            for key in settings {
                tracing::info!(key, "the reload applied a changed setting");
            }
            for ModelChange { name, change, keys, why } in models {
                let (change, keys) = (change.to_string(), keys.join(", "));
                match why {
                    None => {
                        tracing::info!(model = name, change, keys, "the reload applied the model's changes")
                    }
                    Some(why) => tracing::error!(
                        model = name,
                        change,
                        keys,
                        why,
                        "the reload failed for this model; check its state with `shadowslice status`, correct the cause, and reload again"
                    ),
                }
            }
            tracing::info!(changed = models.len(), unchanged, "configuration reloaded");
        }
        Err(ReloadRefused::Faulty(faults)) => {
            for fault in faults.lines() {
                tracing::error!(%fault, "the configuration file has an error; see the fault");
            }
            tracing::error!(
                "the configuration has errors, so the reload changed nothing; correct the file, and reload again"
            );
        }
        Err(refused @ ReloadRefused::Impossible(_)) => {
            tracing::error!(
                why = refused.to_string(),
                "cannot apply the configuration, so the reload changed nothing"
            );
        }
    }
}
