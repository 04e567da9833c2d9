//! New versions in folders of versions. A version counts when its files have not changed between two
//! looks; its worker then proves that they are complete.

use std::collections::BTreeMap;
use std::path::PathBuf;

use shadowslice_config::{
    RolloutConfig, RolloutRules, VersionFolder, VersionPolicy, find_versions, version_of,
};

use crate::models::registry::{ModelTable, Registry};
use crate::process::FileStamps;

/// The newest versions of folders at the last look, by the models' names.
#[derive(Debug, Default)]
pub(in crate::models) struct FolderWatch {
    seen: BTreeMap<String, NewVersion>,
    /// The versions that were already started once. They are started again only if their files change.
    tried: BTreeMap<String, NewVersion>,
}

/// A version that is newer than all known ones.
#[derive(Debug, Clone, PartialEq)]
struct NewVersion {
    number: u32,
    path: PathBuf,
    stamps: FileStamps,
}

/// A model with a folder of versions.
struct WatchedFolder {
    name: String,
    folder: VersionFolder,
    newest: u32,
    /// The version that was tried last, if it does not run.
    failed: Option<u32>,
}

impl Registry {
    /// Looks for new versions, and rolls out those that are complete.
    pub(in crate::models) async fn look_at_folders(&self, watch: &mut FolderWatch) {
        // During an upgrade, no command and no rollout may begin.
        let Ok(_permit) = self.begin_command() else { return };
        let _turn = self.0.reading.lock().await;
        let folders = watched_folders(&self.table(), &watch.tried);
        for folder in folders {
            let name = folder.name.clone();
            let Some(found) = self.find_new_version(folder).await else {
                watch.seen.remove(&name);
                continue;
            };
            let is_stable = watch.seen.insert(name.clone(), found.clone()).as_ref() == Some(&found);
            if is_stable && watch.tried.get(&name) != Some(&found) {
                watch.tried.insert(name.clone(), found.clone());
                self.roll_out_found(&name, &found).await;
            }
        }
    }

    async fn find_new_version(&self, folder: WatchedFolder) -> Option<NewVersion> {
        let config = self.table().desired_config();
        let read = move || {
            let found = find_versions(&folder.folder.path).into_iter().next_back()?;
            if found.number <= folder.newest && Some(found.number) != folder.failed {
                return None;
            }
            let model = version_of(&config, &folder.name, found.number, &found.path)?;
            Some(NewVersion { number: found.number, path: found.path, stamps: FileStamps::of(&model) })
        };
        // If the folder cannot be read, the next look tries again.
        self.0.files.lock().await.read(read).await.ok().flatten()
    }

    async fn roll_out_found(&self, name: &str, found: &NewVersion) {
        let config = {
            let table = self.table();
            table.released(name).and_then(|entry| entry.model().rollout.clone())
        };
        let config = config.unwrap_or_else(at_once);
        if let Err(why) = self.start_rollout(name, &found.path, config).await {
            tracing::error!(
                model = name,
                version = found.number,
                why,
                "cannot roll out a new version of the model; correct the cause, and run `shadowslice rollout`"
            );
        }
    }
}

/// Returns the folders whose models can get a new version now. A list of versions changes only with the
/// configuration.
fn watched_folders(table: &ModelTable, tried: &BTreeMap<String, NewVersion>) -> Vec<WatchedFolder> {
    let mut folders: BTreeMap<String, WatchedFolder> = BTreeMap::new();
    for entry in table.entries() {
        let model = entry.model();
        let name = entry.served_name.clone();
        let is_busy = table.rollout(&name).is_some();
        let folder = model.version.folder.clone().filter(|_| !is_busy);
        let watched = folder.filter(|folder| !matches!(folder.policy, VersionPolicy::Listed(_)));
        let Some(folder) = watched else { continue };
        let runs = |number: u32| {
            table.entries().iter().any(|other| other.served_name == name && other.number == number)
        };
        let failed = tried.get(&name).map(|version| version.number).filter(|number| !runs(*number));
        let newest = table.newest(&name);
        folders.insert(name.clone(), WatchedFolder { name, folder, newest, failed });
    }
    folders.into_values().collect()
}

/// Returns the rollout of a model without the section `rollout`: the new version takes over as soon as it is
/// ready, and the former one ends.
pub(in crate::models) fn at_once() -> RolloutConfig {
    let config = RolloutConfig::default();
    let rules = RolloutRules { mirror: 0.0, canary: Vec::new(), ..config.rules };
    RolloutConfig { rules, keep: std::time::Duration::ZERO, ..config }
}
