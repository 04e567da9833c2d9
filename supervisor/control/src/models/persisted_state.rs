//! The state that the configuration does not contain. A file keeps it for the next supervisor.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read};
use std::path::Path;

use serde::{Deserialize, Serialize};
use shadowslice_shared::units::Percent;

use super::ModelSet;
use super::client_overrides::ClientOverrides;
use super::desired::FirstShare;
use super::versions::{ModelVersions, Release, VersionTable};
use shadowslice_config::{Config, ModelConfig};
use shadowslice_datapath::readiness::HostState;
use shadowslice_datapath::router::Router;

/// The maximum size of the file, in bytes. The state of a thousand models has 200 kB.
const MAX_BYTES: u64 = 4 << 20;

/// The name of the file in earlier versions.
const FORMER_NAME: &str = "known.json";

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct PersistedState {
    /// True if an operator has drained the host.
    pub drained: bool,
    pub models: BTreeMap<String, PersistedModel>,
    /// The released versions that the configuration file does not name, by the models' names.
    pub(super) releases: BTreeMap<String, Release>,
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct PersistedModel {
    /// The initial share in the configuration, in percent. If the configuration has another one now, the
    /// share in force is not restored.
    pub initial_percent: u32,
    /// The share in force, in percent.
    pub share_percent: u32,
    /// True if an operator holds the share.
    pub held: bool,
    pub drained: bool,
    /// True if a client has unloaded the model.
    pub unloaded: bool,
    /// The index of the model's GPU.
    pub gpu: Option<usize>,
    /// The time that the model's last worker took to start, in ms. `None` if no worker serves.
    pub start_ms: Option<u64>,
    /// The changes of the model's configuration by clients.
    #[serde(rename = "by_clients")]
    overrides: ClientOverrides,
}

impl PersistedState {
    pub fn of(models: &ModelSet, router: &Router) -> Self {
        let served = models.served.iter().map(|served| {
            let report = served.report.borrow();
            let name = &served.model.name;
            let model = PersistedModel {
                initial_percent: served.model.share.initial.get(),
                share_percent: report.share.get(),
                held: report.held,
                drained: router.is_model_drained(served.model.served_name()),
                unloaded: false,
                gpu: Some(served.model.gpu),
                start_ms: report.start_ms(),
                overrides: models.overrides.get(name).cloned().unwrap_or_default(),
            };
            (name.clone(), model)
        });
        let unloaded = models.unloaded.iter().map(|unloaded| {
            let initial_percent = unloaded.model.share.initial.get();
            let gpu = Some(unloaded.model.gpu);
            let model = PersistedModel { initial_percent, unloaded: true, gpu, ..PersistedModel::default() };
            (unloaded.model.name.clone(), model)
        });
        let drained = router.host() == HostState::Drained;
        Self { drained, models: served.chain(unloaded).collect(), releases: models.releases.clone() }
    }

    /// Returns the releases that are in force with this configuration.
    pub(super) fn versions(&self, config: &Config) -> VersionTable {
        let is_served = |(name, release): &(&String, &Release)| {
            let is_it =
                |model: &ModelConfig| model.served_name() == *name && model.version.number == release.number;
            config.models.iter().any(is_it)
        };
        let versions = |(model, release): (&String, &Release)| {
            let released = Some(release.number);
            let versions = ModelVersions { released, release: Some(release.clone()), ..Default::default() };
            (model.clone(), versions)
        };
        self.releases.iter().filter(is_served).map(versions).collect()
    }

    /// Reads the state. Returns the default if the file does not exist or cannot be read. In the second
    /// case, logs a warning.
    pub fn read(path: &Path) -> Self {
        let read = |path: &Path| -> io::Result<Self> {
            let mut text = Vec::new();
            fs::File::open(path)?.take(MAX_BYTES).read_to_end(&mut text)?;
            Ok(serde_json::from_slice(&text)?)
        };
        let is_missing = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
        let state = match read(path) {
            Err(error) if is_missing(&error) => read(&path.with_file_name(FORMER_NAME)),
            state => state,
        };
        match state {
            Ok(state) => state,
            Err(error) if is_missing(&error) => Self::default(),
            Err(error) => {
                let path = path.display();
                tracing::warn!(
                    %path,
                    %error,
                    "cannot read the models' saved state; models start with their initial shares, and drains, holds, unloaded models and clients' changes are lost; repeat those that you need"
                );
                Self::default()
            }
        }
    }

    /// Replaces the file. The file is complete at any time.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        let new = path.with_extension("new");
        fs::write(&new, serde_json::to_vec(self)?)?;
        fs::rename(new, path)?;
        match fs::remove_file(path.with_file_name(FORMER_NAME)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Returns the share with which the first worker of a model starts. The share is `otherwise` if no
    /// other one is known.
    pub(super) fn share(&self, model: &ModelConfig, otherwise: Percent) -> FirstShare {
        let known = self.models.get(&model.name);
        let same = known.filter(|known| known.initial_percent == model.share.initial.get());
        let range = model.share.min..=model.share.max;
        let known = same.and_then(|known| {
            let share = Percent::new(known.share_percent).ok().filter(|share| range.contains(share))?;
            Some(FirstShare { share, held: known.held })
        });
        known.unwrap_or(FirstShare { share: otherwise, held: false })
    }

    pub(super) fn gpu(&self, model: &str) -> Option<usize> {
        self.models.get(model)?.gpu
    }

    pub(super) fn overrides(&self, model: &str) -> Option<&ClientOverrides> {
        self.models.get(model).map(|known| &known.overrides).filter(|overrides| !overrides.is_empty())
    }

    pub(super) fn is_unloaded(&self, model: &str) -> bool {
        self.models.get(model).is_some_and(|known| known.unloaded)
    }

    /// Returns the names of `models` in the order in which they move to this supervisor during an
    /// upgrade. A model that starts fast moves first. A model that nobody serves moves last.
    pub fn upgrade_order<'a>(&self, models: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
        let mut names: Vec<_> = models.collect();
        let start_ms = |name: &str| self.models.get(name).and_then(|known| known.start_ms);
        // Models of an older supervisor have no times, and keep their order.
        names.sort_by_key(|name| start_ms(name).unwrap_or(u64::MAX));
        names
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_is_written_and_read_and_garbage_counts_as_no_state() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.json");
        assert_eq!(PersistedState::read(&path), PersistedState::default());
        let model = PersistedModel {
            initial_percent: 40,
            share_percent: 20,
            held: true,
            ..PersistedModel::default()
        };
        let models = BTreeMap::from([("m".to_owned(), model)]);
        let release = Release { number: 2, path: "/b".into(), written: "/a".into(), newest: 3 };
        let releases = BTreeMap::from([("m".to_owned(), release)]);
        let state = PersistedState { drained: true, models, releases };
        state.write(&path).unwrap();
        assert_eq!(PersistedState::read(&path), state);
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "no other file is left");
        fs::write(&path, r#"{"models": {"m": {"held": true, "later": 1}}}"#).unwrap();
        assert!(PersistedState::read(&path).models["m"].held, "as a later version may write it");
        for garbage in ["", "{", "[]", r#"{"models": {"m": {"share_percent": -1}}}"#] {
            fs::write(&path, garbage).unwrap();
            assert_eq!(PersistedState::read(&path), PersistedState::default(), "{garbage}");
        }
    }

    #[test]
    fn the_file_of_an_earlier_version_is_read_and_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let (former, path) = (folder.path().join(FORMER_NAME), folder.path().join("state.json"));
        fs::write(&former, r#"{"models": {"m": {"held": true}}}"#).unwrap();
        let state = PersistedState::read(&path);
        assert!(state.models["m"].held);
        state.write(&path).unwrap();
        assert!(!former.try_exists().unwrap());
        assert_eq!(PersistedState::read(&path), state);
    }

    #[test]
    fn fast_models_move_first_and_models_without_a_worker_last() {
        let models = [("slow", Some(60_000)), ("down", None), ("fast", Some(100))];
        let model = |(name, start_ms): (&str, _)| {
            (name.to_owned(), PersistedModel { start_ms, ..PersistedModel::default() })
        };
        let state = PersistedState { models: models.map(model).into(), ..PersistedState::default() };
        let order = state.upgrade_order(["slow", "new", "down", "fast"].into_iter());
        assert_eq!(order, ["fast", "slow", "new", "down"]);
    }
}
