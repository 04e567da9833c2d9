//! Models that their files make unready are loaded again when those have changed.

use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::task::{JoinHandle, spawn_blocking};

use super::registry::Registry;
use crate::process::LoadedFiles;
use shadowslice_config::{ModelConfig, model_files};

/// How often files are looked at. A change counts once a second look finds the same, as a file may
/// be half written.
pub(super) const LOOK: Duration = Duration::from_millis(500);

/// How often the files of models that are ready are looked at, in looks.
const READY_LOOKS: u32 = 20;

/// Tells a model's files from what they were before.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Stamps {
    model: Vec<(PathBuf, Stamp)>,
    /// The profile, and the files that the warm-up takes values from.
    beside: Vec<Stamp>,
}

/// Of one file, where there is one.
type Stamp = Option<[i64; 5]>;

impl Stamps {
    /// Returns the stamps of the model's files, and of those that only its configuration names.
    pub(super) fn of(model: &ModelConfig) -> Self {
        let files = model_files(&model.engine).into_iter().map(|path| (path.clone(), stamp(&path)));
        let beside = model.profile_path.as_deref().into_iter().chain(model.warmup.files()).map(stamp);
        Self { model: files.collect(), beside: beside.collect() }
    }

    /// Returns whether the model's files are others by now. A reload reads the others
    /// anyway, and compares what they say.
    fn differ_now(&self) -> bool {
        self.model.iter().any(|(path, then)| stamp(path) != *then)
    }
}

fn stamp(path: &Path) -> Stamp {
    let found = std::fs::metadata(path).ok()?;
    Some([
        found.ino().cast_signed(),
        found.size().cast_signed(),
        found.mtime(),
        found.mtime_nsec(),
        found.ctime(),
    ])
}

/// A model's files as they were found when it was made.
#[derive(Debug, Default)]
pub(super) struct FoundFiles {
    pub(super) stamps: Stamps,
    /// The same files, held open.
    pub(super) loaded: Arc<LoadedFiles>,
}

impl FoundFiles {
    pub(super) fn of(model: &ModelConfig) -> Self {
        Self { stamps: Stamps::of(model), loaded: Arc::new(LoadedFiles::open(&model.engine)) }
    }
}

/// As they were when the model was made or tried again, and at the last look.
#[derive(Debug)]
pub(super) struct WatchedFiles {
    tried: Stamps,
    seen: Stamps,
}

impl WatchedFiles {
    pub(super) fn new(found: Stamps) -> Self {
        Self { tried: found.clone(), seen: found }
    }

    /// Whether the files are others than those that were tried, and written to their end. If so,
    /// these are the ones that were tried from now on.
    fn have_changed(&mut self, found: Stamps) -> bool {
        let changed = found == self.seen && found != self.tried;
        if changed {
            self.tried = found.clone();
        }
        self.seen = found;
        changed
    }
}

impl Registry {
    /// Opens a model's files. Those that cannot be read in time are not held.
    pub(super) async fn find_files(&mut self, model: &Arc<ModelConfig>) -> FoundFiles {
        let of = Arc::clone(model);
        let found = self.files.read(move || FoundFiles::of(&of)).await.unwrap_or_default();
        self.files.digest(&found.loaded);
        found
    }

    pub(super) async fn load_the_mended(&mut self) {
        for model in self.unready() {
            // Files that served before are exchanged by a reload alone.
            if self.served(&model.name).is_some_and(|served| served.files.is_lost.load(Ordering::Relaxed)) {
                continue;
            }
            let of = Arc::clone(&model);
            // What is stuck is told by a reload.
            let Ok(found) = self.files.read(move || Stamps::of(&of)).await else { return };
            let name = &model.name;
            if self.watched_files(name).is_some_and(|files| files.have_changed(found)) {
                tracing::info!(
                    model = name,
                    "the files of an unready model have changed; loading the model again"
                );
                if let Err(error) = self.load_again(name, None).await {
                    tracing::error!(
                        model = name,
                        %error,
                        "cannot load the model from its changed files; trying again when its files change"
                    );
                }
            }
        }
    }
}

/// The look at the files of ready models. It happens beside the registry, which must not wait for a
/// file system.
#[derive(Debug, Default)]
pub(super) struct ReadyWatch {
    /// The number of the registry's looks since the last one at these files.
    looks: u32,
    looking: Option<JoinHandle<()>>,
}

impl Registry {
    /// Notes now and then which models have other files than they were loaded from.
    pub(super) fn note_changed_files(&mut self) {
        self.ready_watch.looks = (self.ready_watch.looks + 1) % READY_LOOKS;
        let is_looking = self.ready_watch.looking.as_ref().is_some_and(|look| !look.is_finished());
        if self.ready_watch.looks > 0 || is_looking {
            return;
        }
        let watched: Vec<_> = self
            .loaded()
            .into_iter()
            .filter_map(|model| {
                let files = Arc::clone(&self.served(&model.name)?.files);
                Some((files, self.watched_files(&model.name)?.tried.clone(), model))
            })
            .collect();
        self.ready_watch.looking = Some(spawn_blocking(move || {
            for (files, tried, model) in watched {
                let is_changed = tried.differ_now();
                if is_changed && !files.changed.swap(true, Ordering::Relaxed) {
                    tracing::warn!(
                        model = model.name,
                        "the model's files have changed since the model was loaded; run `shadowslice reload` to serve them"
                    );
                }
                files.changed.store(is_changed, Ordering::Relaxed);
            }
        }));
    }

    /// Returns the names of models whose files are not those that they were loaded from. None if the
    /// files cannot be looked at.
    pub(super) async fn changed_on_disk(&mut self) -> HashSet<String> {
        let loaded = self.loaded();
        let tried = |model: Arc<ModelConfig>| {
            let files = self.watched_files(&model.name)?;
            Some((model.name.clone(), files.tried.clone()))
        };
        let tried: Vec<(String, Stamps)> = loaded.into_iter().filter_map(tried).collect();
        let differ = move || tried.into_iter().filter(|(_, tried)| tried.differ_now());
        self.files.read(move || differ().map(|(name, _)| name).collect()).await.unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_have_changed_once_when_they_are_others_and_do_not_change_any_more() {
        let file = |stamp| (PathBuf::from("m"), stamp);
        let stamps =
            |size| Stamps { model: vec![file(Some([0, size, 0, 0, 0])), file(None)], beside: vec![None] };
        let [first, second, third] = [1, 2, 3].map(stamps);
        let mut files = WatchedFiles::new(first.clone());
        let mut looks = |found: &Stamps| files.have_changed(found.clone());
        assert!(!looks(&first));
        assert!(!looks(&second), "it may be half written");
        assert!(!looks(&third));
        assert!(looks(&third));
        assert!(!looks(&third), "it is tried once");
        assert!(!looks(&first));
        assert!(looks(&first));
    }
}
