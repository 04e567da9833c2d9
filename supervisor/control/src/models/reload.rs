//! A reload: the file is read and checked whole, compared with what is in force, and carried out.

use std::collections::HashSet;

use super::plan::{self, Change, Plan};
use super::registry::{Registry, Waits};
use super::{ChangeKind, ModelChange, ReloadRefused, ReloadReport};
use shadowslice_config as config;
use shadowslice_config::{Config, ConfigError, FaultList, ModelConfig};
use shadowslice_shared::errors;

impl Registry {
    /// A file with faults, or with a change that needs a restart, changes nothing.
    pub(super) async fn reload(&mut self) -> Result<ReloadReport, ReloadRefused> {
        let outcome = match self.read().await {
            Ok((config, plan)) => Ok(self.carry_out(&config, plan).await),
            Err(refused) => Err(refused),
        };
        tell(&outcome);
        outcome
    }

    async fn read(&mut self) -> Result<(Config, Plan), ReloadRefused> {
        let file = self.file.clone();
        let read = self.files.read(move || config::load_here(&file)).await;
        let read = read.map_err(ReloadRefused::Impossible)?;
        let config = read.map_err(|error| ReloadRefused::Faulty(faults(&error)))?;
        let faults = [&config.file_faults[..], &config.host_faults].concat();
        if !faults.is_empty() {
            return Err(ReloadRefused::Faulty(FaultList(&faults).to_string()));
        }
        let config = self.placed(config, |name| self.model(name).map(|model| model.gpu));
        let mut plan = plan::plan(&self.config(), &config)
            .map_err(|fixed| ReloadRefused::Impossible(fixed.to_string()))?;
        // The reason why a model is unready may lie outside the file, so such a model is tried
        // again though its keys are the same.
        let differs: HashSet<_> = plan.changed.iter().map(|change| change.model.name.clone()).collect();
        let unready = self.unready();
        let changed = self.changed_on_disk().await;
        for change in plan.changed.iter_mut().filter(|change| changed.contains(&change.model.name)) {
            change.reads_files();
        }
        let is_again = |model: &&ModelConfig| {
            changed.contains(&model.name) || unready.iter().any(|other| other.name == model.name)
        };
        let again = config.models.iter().filter(is_again);
        plan.changed.extend(again.filter(|model| !differs.contains(&model.name)).map(Change::again));
        self.factory.learn_library(&config).map_err(ReloadRefused::Impossible)?;
        Ok((config, plan))
    }

    async fn carry_out(&mut self, config: &Config, plan: Plan) -> ReloadReport {
        for note in &config.notes {
            tracing::warn!(%note, "the configuration is valid, but you should correct one setting");
        }
        let sampled = plan.sample.map(|sample| self.sample(sample)).map(|()| "tracing.sample");
        let ready = plan.ready.map(|rule| self.ready_by(rule)).map(|()| "ready");
        let settings = [sampled, ready].into_iter().flatten().map(str::to_owned).collect();
        let (mut rows, mut waits) = (Vec::new(), Waits::new());
        for name in plan.removed {
            self.remove(&name);
            rows.push(row(&name, ChangeKind::Removed, &[], Ok(())));
        }
        for change in &plan.changed {
            let (kind, begun) = self.change(change, rows.len(), &mut waits).await;
            rows.push(row(&change.model.name, kind, &change.keys(), begun));
        }
        for model in plan.added {
            let name = model.name.clone();
            let begun = self.load(model, rows.len(), &mut waits).await;
            rows.push(row(&name, ChangeKind::Added, &[], begun));
        }
        self.as_written(&config.models);
        self.publish();
        self.settle_all(&mut rows, waits).await;
        let touched = rows.iter().filter(|row| row.change != ChangeKind::Removed).count();
        let unchanged = config.models.len().saturating_sub(touched);
        ReloadReport { file: self.file.clone(), models: rows, unchanged, settings }
    }
}

fn row(name: &str, change: ChangeKind, keys: &[&str], begun: Result<(), String>) -> ModelChange {
    let keys = keys.iter().map(|key| (*key).to_owned()).collect();
    ModelChange { name: name.to_owned(), change, keys, why: begun.err() }
}

/// Logs that a model keeps its old workers, because the new ones did not become ready.
pub(super) fn log_unchanged(model: &str, why: &str) {
    tracing::error!(
        model,
        why,
        "the model is unchanged, because its new workers are not ready; the old workers keep serving; correct the cause, and repeat the reload or load"
    );
}

/// Logs that a model has its new configuration without the new share. Another reload would find
/// no difference.
pub(super) fn log_half_changed(model: &str, why: &str) {
    tracing::error!(
        model,
        why,
        "a change of the model failed and cannot be undone: the model has its new configuration, but not the new share; run `shadowslice resize MODEL SHARE`, or restart the supervisor"
    );
}

/// Every line is a fault, as `check` says it.
fn faults(error: &ConfigError) -> String {
    match error {
        ConfigError::Faults(_) => error.to_string(),
        ConfigError::Read { .. } => errors::chain(error),
    }
}

fn tell(outcome: &Result<ReloadReport, ReloadRefused>) {
    match outcome {
        Ok(ReloadReport { models, unchanged, settings, .. }) => {
            for key in settings {
                tracing::info!(key, "the reload applied a changed setting");
            }
            for ModelChange { name, change, keys, why } in models {
                let (change, keys) = (change.name(), keys.join(", "));
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
