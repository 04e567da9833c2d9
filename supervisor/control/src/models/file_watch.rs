//! The watch of models' files. A model that is unready because of its files is loaded again when they
//! have changed. If the files of a model that serves have changed, `status` shows that.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use shadowslice_config::ModelConfig;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::MissedTickBehavior;

use super::registry::Registry;
use super::rollout::FolderWatch;
use crate::process::{FileStamps, LoadedFiles};

/// The time between two looks at the files of unready models. A change counts if the next look finds the
/// same files, as a file may be half written.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);

/// The number of looks between two looks at the files of ready models.
const READY_LOOKS: u32 = 20;

/// The files of an unready model at the last attempt to load it, and at the last look.
#[derive(Debug)]
struct UnreadyFiles {
    /// The files of the instance that is unready.
    of_instance: Arc<LoadedFiles>,
    tried: FileStamps,
    seen: FileStamps,
}

impl UnreadyFiles {
    fn new(of_instance: Arc<LoadedFiles>) -> Self {
        Self { tried: of_instance.stamps(), seen: of_instance.stamps(), of_instance }
    }

    /// Returns whether the files have changed since the last attempt, and are completely written. If so,
    /// they count as tried.
    fn have_changed(&mut self, found: FileStamps) -> bool {
        let changed = found == self.seen && found != self.tried;
        if changed {
            self.tried = found.clone();
        }
        self.seen = found;
        changed
    }
}

/// The state of the watch.
#[derive(Debug, Default)]
struct FileWatch {
    unready: HashMap<String, UnreadyFiles>,
    folders: FolderWatch,
    looks: u32,
    /// The look at the files of ready models, which a file system may block.
    looking: Option<JoinHandle<()>>,
}

impl Registry {
    /// Opens a model's files. Files that cannot be read in time are not kept open.
    pub(super) async fn find_files(&self, model: &Arc<ModelConfig>) -> Arc<LoadedFiles> {
        let of = Arc::clone(model);
        let mut files = self.0.files.lock().await;
        let found = files.read(move || Arc::new(LoadedFiles::open(&of))).await.unwrap_or_default();
        files.digest(&found);
        found
    }

    /// Watches files, and moves models to GPUs with more room, forever.
    pub async fn watch(&self) {
        let mut watch = FileWatch::default();
        let mut interval = tokio::time::interval(LOOK_INTERVAL);
        interval.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            interval.tick().await;
            self.look_at_unready(&mut watch).await;
            self.look_at_ready(&mut watch);
            self.look_at_folders(&mut watch.folders).await;
            self.move_for_slack().await;
        }
    }

    async fn look_at_unready(&self, watch: &mut FileWatch) {
        if self.is_paused() {
            return;
        }
        let unready = self.unready_files();
        watch.unready.retain(|name, _| unready.iter().any(|(model, _)| model.name == *name));
        for (model, of_instance) in unready {
            let of = Arc::clone(&model);
            // If the files cannot be read, a reload says why.
            let Ok(found) = self.0.files.lock().await.read(move || FileStamps::of(&of)).await else { return };
            let files = watch.unready.entry(model.name.clone());
            let files = files.or_insert_with(|| UnreadyFiles::new(Arc::clone(&of_instance)));
            if !Arc::ptr_eq(&files.of_instance, &of_instance) {
                *files = UnreadyFiles::new(of_instance);
            }
            if files.have_changed(found) {
                tracing::info!(
                    model = model.name,
                    "the files of an unready model have changed; loading the model again"
                );
                let registry = self.clone();
                tokio::spawn(async move { registry.load_changed(&model.name).await });
            }
        }
    }

    async fn load_changed(&self, name: &str) {
        if let Err(error) = self.load(name, None).await {
            tracing::error!(
                model = name,
                %error,
                "cannot load the model from its changed files; trying again when its files change"
            );
        }
    }

    /// Returns the unready models, with the files of their instances. If a model's files served before,
    /// only a reload replaces them.
    fn unready_files(&self) -> Vec<(Arc<ModelConfig>, Arc<LoadedFiles>)> {
        let table = self.table();
        let failing = table.entries().iter().filter(|entry| entry.is_failing());
        let files = failing.filter_map(|entry| {
            let served = entry.row.served()?;
            let is_lost = served.files.is_lost.load(Ordering::Relaxed);
            Some((entry.model(), entry.row.newest_files.clone()?)).filter(|_| !is_lost)
        });
        files.collect()
    }

    /// Records sometimes which models have other files than those that they were loaded from.
    fn look_at_ready(&self, watch: &mut FileWatch) {
        watch.looks = (watch.looks + 1) % READY_LOOKS;
        let is_looking = watch.looking.as_ref().is_some_and(|look| !look.is_finished());
        if watch.looks > 0 || is_looking {
            return;
        }
        let table = self.table();
        let served = table.entries().iter().filter_map(|entry| entry.row.served());
        let loaded: Vec<_> =
            served.map(|served| (served.model.name.clone(), Arc::clone(&served.files))).collect();
        watch.looking = Some(spawn_blocking(move || {
            for (model, files) in loaded {
                let is_changed = files.have_changed();
                if is_changed && !files.changed.swap(true, Ordering::Relaxed) {
                    tracing::warn!(
                        model,
                        "the model's files have changed since the model was loaded; run `shadowslice reload` to serve them"
                    );
                }
                files.changed.store(is_changed, Ordering::Relaxed);
            }
        }));
    }

    /// Returns the files that the models' newest instances were loaded from, by model.
    pub(super) fn newest_files(&self) -> Vec<(String, Arc<LoadedFiles>)> {
        let table = self.table();
        let served = table.entries().iter().filter(|entry| entry.row.served().is_some());
        served.filter_map(|entry| Some((entry.name.clone(), entry.row.newest_files.clone()?))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_have_changed_once_when_they_are_others_and_do_not_change_any_more() {
        let [first, second, third] = [1, 2, 3].map(|size| FileStamps::of_sizes(&[Some(size), None, None]));
        let of_instance = Arc::default();
        let mut files = UnreadyFiles { of_instance, tried: first.clone(), seen: first.clone() };
        let mut looks = |found: &FileStamps| files.have_changed(found.clone());
        assert!(!looks(&first));
        assert!(!looks(&second), "it may be half written");
        assert!(!looks(&third));
        assert!(looks(&third));
        assert!(!looks(&third), "it is tried once");
        assert!(!looks(&first));
        assert!(looks(&first));
    }
}
