//! Models that their files make unready are loaded again when those have changed.

use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::registry::Registry;
use shadowslice_config::{Model, model_files};

/// How often files are looked at. A change counts once a second look finds the same, as a file may
/// be half written.
pub(super) const LOOK: Duration = Duration::from_millis(500);

/// How often the files of models that are ready are looked at, in looks.
const READY_LOOKS: u32 = 20;

/// Tells a model's files from what they were before.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Stamps {
    model: Vec<Stamp>,
    profile: Option<Stamp>,
}

/// Of one file, where there is one.
type Stamp = Option<[i64; 5]>;

impl Stamps {
    /// Returns the stamps of the model's files and of its profile.
    pub(super) fn of(model: &Model) -> Self {
        let files = model_files(&model.engine);
        let profile = model.profile_path.as_ref().map(|path| stamp(path));
        Self { model: files.iter().map(|path| stamp(path)).collect(), profile }
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

    /// Returns whether the model's files are others than those that were tried. A reload reads the
    /// profile anyway, and compares what it says.
    pub(super) fn differ(&self, found: &Stamps) -> bool {
        found.model != self.tried.model
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
    pub(super) async fn load_the_mended(&mut self) {
        for model in self.unready() {
            let of = Arc::clone(&model);
            // What is stuck is told by a reload.
            let Ok(found) = self.files.read(move || Stamps::of(&of)).await else { return };
            let name = &model.name;
            if self.watched_files(name).is_some_and(|files| files.have_changed(found)) {
                tracing::info!(model = name, "its files have changed, and it is loaded again");
                if let Err(error) = self.load_again(name, None).await {
                    tracing::error!(model = name, %error, "it is not loaded by its changed files");
                }
            }
        }
    }
}

impl Registry {
    /// Notes now and then which models have other files than they were loaded from.
    pub(super) async fn note_changed_files(&mut self) {
        self.looks = (self.looks + 1) % READY_LOOKS;
        if self.looks > 0 {
            return;
        }
        let changed = self.changed_on_disk().await;
        for model in self.loaded() {
            let Some(served) = self.served(&model.name) else { continue };
            let is_changed = changed.contains(&model.name);
            if is_changed && !served.files_changed.swap(is_changed, Ordering::Relaxed) {
                tracing::warn!(
                    model = model.name,
                    "the model's files have changed since it was loaded; reload to serve them"
                );
            }
            served.files_changed.store(is_changed, Ordering::Relaxed);
        }
    }

    /// Returns the names of models whose files are not those that they were loaded from.
    pub(super) async fn changed_on_disk(&mut self) -> HashSet<String> {
        let mut changed = HashSet::new();
        for model in self.loaded() {
            let of = Arc::clone(&model);
            let Ok(found) = self.files.read(move || Stamps::of(&of)).await else { return changed };
            if self.watched_files(&model.name).is_some_and(|files| files.differ(&found)) {
                changed.insert(model.name.clone());
            }
        }
        changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_have_changed_once_when_they_are_others_and_do_not_change_any_more() {
        let stamps = |size| Stamps { model: vec![Some([0, size, 0, 0, 0]), None], profile: Some(None) };
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
