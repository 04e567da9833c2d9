//! The versions of the models: the released one, and those that run beside it.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use shadowslice_config::{Config, ModelConfig, VersionPolicy, version_of};
use shadowslice_datapath::router::{HostedModel, Route};
use shadowslice_datapath::versions::{Canary, CanarySplit, Mirror};

use super::registry::Entry;
use super::rollout::{RolloutHandle, RolloutOutcome};
use crate::controller::VersionRole;

/// A released version that the configuration file does not name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Release {
    pub(super) number: u32,
    pub(super) path: PathBuf,
    /// The path in the file. If the file gets another path, that path counts.
    pub(super) written: PathBuf,
    /// The newest version at the time of the release. A newer one in a folder of versions counts more.
    pub(super) newest: u32,
}

/// The versions of a model.
#[derive(Debug, Default)]
pub(super) struct ModelVersions {
    /// The number of the released version. `None` means the newest one.
    pub(super) released: Option<u32>,
    pub(super) release: Option<Release>,
    pub(super) rollout: Option<ActiveRollout>,
    pub(super) last: Option<RolloutOutcome>,
}

/// A rollout in progress. It ends when one of the two versions is unloaded.
#[derive(Debug)]
pub(super) struct ActiveRollout {
    pub(super) handle: RolloutHandle,
    pub(super) mirror: Option<Arc<Mirror>>,
    pub(super) canary: Option<Arc<CanarySplit>>,
}

/// The versions of all models, by the names that clients use. Models whose only version is in the file
/// have no entry.
pub(super) type VersionTable = BTreeMap<String, ModelVersions>;

/// Returns the path of a model in the configuration file.
pub(super) fn written_path(model: &ModelConfig) -> PathBuf {
    let folder = model.version.folder.as_ref().map(|folder| folder.path.clone());
    folder.or_else(|| model.engine.path().map(PathBuf::from)).unwrap_or_default()
}

/// Returns the configuration with the released versions that the file does not name. Reads files.
pub(super) fn with_releases(mut config: Config, releases: &BTreeMap<String, Release>) -> Config {
    let replaced = config.models.iter().map(|model| {
        let release = releases.get(model.served_name()).filter(|release| release.applies_to(model));
        let is_it = |release: &Release| {
            release.number == model.version.number && Some(&*release.path) == model.engine.path()
        };
        let other = release.filter(|release| !is_it(release));
        let version =
            other.and_then(|release| version_of(&config, model.served_name(), release.number, &release.path));
        version.map_or_else(
            || model.clone(),
            |version| ModelConfig { gpu: model.gpu, share: model.share, ..version },
        )
    });
    config.models = replaced.collect();
    config
}

impl Release {
    /// Returns whether the release counts instead of the version in the file.
    fn applies_to(&self, model: &ModelConfig) -> bool {
        match &model.version.folder {
            None => [&self.written, &self.path].contains(&&written_path(model)),
            Some(folder) => folder.policy == VersionPolicy::Latest && model.version.number <= self.newest,
        }
    }
}

/// Returns the number of a model's released version.
pub(super) fn released(versions: &VersionTable, entries: &[Entry], name: &str) -> Option<u32> {
    let numbers = || entries.iter().filter(|entry| entry.served_name == name).map(|entry| entry.number);
    let known = versions.get(name).and_then(|versions| versions.released);
    known.filter(|known| numbers().any(|number| number == *known)).or_else(|| numbers().max())
}

/// Returns the part that each instance has in the service of its model.
pub(super) fn roles(versions: &VersionTable, entries: &[Entry]) -> Vec<VersionRole> {
    let mut numbers: HashMap<&str, Vec<u32>> = HashMap::new();
    for entry in entries {
        numbers.entry(&entry.served_name).or_default().push(entry.number);
    }
    let role = |entry: &Entry| {
        let (versions, numbers) = (versions.get(&entry.served_name), &numbers[&*entry.served_name]);
        let known = versions.and_then(|versions| versions.released).filter(|known| numbers.contains(known));
        let rollout = versions.and_then(|versions| versions.rollout.as_ref()).map(|rollout| &rollout.handle);
        match rollout {
            _ if known.or(numbers.iter().max().copied()) == Some(entry.number) => VersionRole::Released,
            Some(handle) if handle.candidate == entry.number => VersionRole::Candidate,
            Some(handle) if handle.former == entry.number => VersionRole::Former,
            _ => VersionRole::Loaded,
        }
    };
    entries.iter().map(role).collect()
}

/// Returns the models that requests can reach. `roles` are those of the instances.
pub(super) fn hosted(
    versions: &VersionTable,
    entries: &[Entry],
    roles: &[VersionRole],
) -> HashMap<String, HostedModel> {
    let mut hosted: HashMap<String, HostedModel> = HashMap::new();
    let routed = |is_released: bool| {
        let wanted = entries.iter().zip(roles).filter(move |(_, role)| role.is_released() == is_released);
        wanted.filter_map(|(entry, _)| Some((entry, entry.row.route()?.clone())))
    };
    for (entry, route) in routed(true) {
        hosted.insert(entry.served_name.clone(), route.into());
    }
    for (entry, route) in routed(false) {
        let model = hosted.entry(entry.served_name.clone()).or_default();
        let rollout = versions.get(&entry.served_name).and_then(|versions| versions.rollout.as_ref());
        if let Some(rollout) = rollout.filter(|rollout| rollout.handle.candidate == entry.number) {
            rollout.join(model, &route);
        }
        model.others.push(route);
    }
    hosted
}

impl ActiveRollout {
    /// Sends the new version its part of the model's requests, and copies.
    fn join(&self, model: &mut HostedModel, candidate: &Route) {
        if let Some(mirror) = &self.mirror {
            model.released = model.released.as_ref().map(|route| route.with_mirror(Arc::clone(mirror)));
        }
        let canary = |split: &Arc<CanarySplit>| Canary { route: candidate.clone(), split: Arc::clone(split) };
        model.canary = self.canary.as_ref().map(canary);
    }
}
