//! The merge of a configuration file with the versions that run. The released version of a model stays
//! until a rollout replaces it.

use std::collections::BTreeMap;
use std::path::PathBuf;

use shadowslice_config::{
    Config, ModelConfig, ModelVersion, QueueConfig, RolloutConfig, VersionPolicy, version_of,
};
use shadowslice_policy::rollout::RolloutStage;

use super::registry::{Entry, ModelTable};
use super::rollout::at_once;
use super::versions::{released, written_path};

/// The versions of a model that run.
#[derive(Debug, Clone)]
pub(super) struct RunningModel {
    /// The name that clients use.
    name: String,
    /// The path in the file that is in force.
    written: PathBuf,
    /// True if the file does not name the released version.
    has_release: bool,
    released: RunningVersion,
    /// The other versions of a rollout in progress.
    others: Vec<RunningVersion>,
    /// The numbers of all versions that run.
    numbers: Vec<u32>,
    /// The highest number that a version has had.
    newest: u32,
    /// True if the released version does not serve, so that nothing is lost if another one replaces it.
    is_failing: bool,
}

#[derive(Debug, Clone)]
struct RunningVersion {
    /// The name of the instance.
    name: String,
    version: ModelVersion,
    path: PathBuf,
    /// The instance as it is, if a rollout has given it another share than the file.
    at_small_share: Option<Box<ModelConfig>>,
}

/// A model whose path in the file has changed, so that its version must be rolled out.
#[derive(Debug)]
pub(super) struct RequiredRollout {
    pub(super) model: String,
    /// The path in the file.
    pub(super) written: PathBuf,
    /// The new version, as the file describes it.
    pub(super) candidate: ModelConfig,
    pub(super) config: RolloutConfig,
}

impl RequiredRollout {
    /// Returns whether the instance with this name serves the model now.
    pub(super) fn replaces(&self, instance: &str) -> bool {
        instance.split(':').next() == Some(&self.model)
    }
}

/// A configuration whose models are the instances that should run.
#[derive(Debug)]
pub(super) struct MergedConfig {
    pub(super) config: Config,
    pub(super) rollouts: Vec<RequiredRollout>,
    /// The paths in the file, by the names that clients use.
    pub(super) written: BTreeMap<String, PathBuf>,
}

impl RunningModel {
    /// Returns the running models. Models of the emulated engine have no versions.
    pub(super) fn all(table: &ModelTable) -> Vec<Self> {
        let is_released =
            |entry: &&Entry| table.released(&entry.served_name).is_some_and(|other| other.name == entry.name);
        table
            .entries()
            .iter()
            .filter(is_released)
            .filter_map(|entry| Self::of(table, &entry.served_name))
            .collect()
    }

    fn of(table: &ModelTable, name: &str) -> Option<Self> {
        let versions = table.versions.get(name);
        let rollout = table.rollout(name);
        let number = released(&table.versions, table.entries(), name)?;
        let entries = || table.entries().iter().filter(|entry| entry.served_name == name);
        let version = |number: u32| {
            let model = entries().find(|entry| entry.number == number)?.model();
            let is_small = rollout.is_some_and(|rollout| {
                rollout.candidate == number
                    && matches!(rollout.stage, RolloutStage::Starting | RolloutStage::Mirror)
            });
            let at_small_share = is_small.then(|| Box::new((*model).clone()));
            let (name, version) = (model.name.clone(), model.version.clone());
            Some(RunningVersion { name, version, path: model.engine.path()?.to_owned(), at_small_share })
        };
        let others = rollout.into_iter().flat_map(|rollout| [rollout.candidate, rollout.former]);
        Some(Self {
            name: name.to_owned(),
            written: table.written_path(name)?,
            has_release: versions.is_some_and(|versions| versions.release.is_some()),
            released: version(number)?,
            others: others.filter(|other| *other != number).filter_map(version).collect(),
            numbers: entries().map(|entry| entry.number).collect(),
            newest: table.newest(name),
            is_failing: table.released(name).is_none_or(Entry::is_failing),
        })
    }
}

/// Merges a new configuration with the versions that run. Reads files.
pub(super) fn merge(config: Config, running: &[RunningModel]) -> MergedConfig {
    let written = |model: &ModelConfig| (model.served_name().to_owned(), written_path(model));
    let mut merged = MergedConfig {
        config: Config { models: Vec::new(), ..config.clone() },
        rollouts: Vec::new(),
        written: config.models.iter().map(written).collect(),
    };
    for versions in config.models.chunk_by(|one, other| one.served_name() == other.served_name()) {
        let running = running.iter().find(|running| running.name == versions[0].served_name());
        match running.filter(|_| versions[0].engine.path().is_some()) {
            Some(running) => running.merge(versions, &config, &mut merged),
            None => merged.config.models.extend_from_slice(versions),
        }
    }
    merged
}

impl RunningModel {
    /// Adds the instances of this model. `versions` are its versions in the file.
    fn merge(&self, versions: &[ModelConfig], config: &Config, merged: &mut MergedConfig) {
        let change = self.change(versions);
        if let PathChange::InPlace = change {
            merged.config.models.extend_from_slice(versions);
            return;
        }
        let next = match &change {
            PathChange::Rollout(next) => Some(next.version.number),
            PathChange::InPlace | PathChange::None => None,
        };
        // The rollout starts its version, unless it runs already.
        let is_started_later = |model: &ModelConfig| {
            Some(model.version.number) == next && !self.numbers.contains(&model.version.number)
        };
        let mut models: Vec<ModelConfig> = match &versions[0].version.folder {
            Some(_) => versions.iter().filter(|model| !is_started_later(model)).cloned().collect(),
            None => Vec::new(),
        };
        if versions[0].version.folder.as_ref().is_some_and(|folder| folder.policy == VersionPolicy::Latest) {
            models.clear();
        }
        for version in std::iter::once(&self.released).chain(&self.others) {
            if !models.iter().any(|model| model.name == version.name) {
                models.extend(version.config(config, &versions[0]));
            }
        }
        merged.config.models.extend(models);
        if let PathChange::Rollout(next) = change {
            merged.rollouts.push(RequiredRollout {
                model: self.name.clone(),
                written: written_path(next),
                candidate: next.clone(),
                config: next.rollout.clone().unwrap_or_else(at_once),
            });
        }
    }

    /// Returns the way in which the file changes the released version.
    fn change<'m>(&self, versions: &'m [ModelConfig]) -> PathChange<'m> {
        let Some(newest) = versions.last() else { return PathChange::None };
        let path = written_path(newest);
        match &newest.version.folder {
            _ if self.is_failing => PathChange::InPlace,
            None if path == self.written || path == self.released.path => PathChange::None,
            None if !self.has_release
                && newest.rollout.is_none()
                && self.others.is_empty()
                && self.released.version.number == 1 =>
            {
                PathChange::InPlace
            }
            None => PathChange::Rollout(newest),
            Some(_) if path != self.written => PathChange::Rollout(newest),
            Some(folder) => {
                let released = &self.released.version.number;
                let is_dropped =
                    matches!(&folder.policy, VersionPolicy::Listed(numbers) if !numbers.contains(released));
                // A version that was rolled back does not count again.
                let is_new = newest.version.number > self.newest;
                if is_new || is_dropped { PathChange::Rollout(newest) } else { PathChange::None }
            }
        }
    }
}

/// The way in which a file changes the released version of a model.
enum PathChange<'m> {
    None,
    /// The instance gets other files.
    InPlace,
    /// This version must be rolled out.
    Rollout(&'m ModelConfig),
}

impl RunningVersion {
    /// Returns the configuration of this version. `written` is a version of the model in the file.
    fn config(&self, config: &Config, written: &ModelConfig) -> Option<ModelConfig> {
        let version = version_of(config, written.served_name(), self.version.number, &self.path)?;
        let number = ModelVersion { folder: written.version.folder.clone(), ..self.version.clone() };
        let version =
            ModelConfig { name: self.name.clone(), version: number, share: written.share, ..version };
        Some(match &self.at_small_share {
            None => version,
            Some(now) => ModelConfig {
                share: now.share,
                queue: QueueConfig { on_late: now.queue.on_late, ..version.queue },
                ..version
            },
        })
    }
}

#[cfg(test)]
#[path = "version_merge_tests.rs"]
mod tests;
