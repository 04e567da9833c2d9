//! Files that are read again when they change, so that certificates and tokens can be replaced
//! without a restart.

use std::fmt;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::RwLock;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, interval_at};

use super::bind_error::BindError;

/// The interval between checks of the files.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// The inode, size and time of change of a file, or `None` if the file is missing.
type Stamp = Option<[i64; 4]>;

/// The content of some files, as it was last read.
pub(crate) struct ReloadingFile<T> {
    content: RwLock<Arc<T>>,
}

impl<T> fmt::Debug for ReloadingFile<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReloadingFile").finish_non_exhaustive()
    }
}

impl<T: Send + Sync + 'static> ReloadingFile<T> {
    /// Reads the files. If the files change later and cannot be used, the last content stays in
    /// use. Must be called on a Tokio runtime.
    pub(crate) fn read(
        files: Vec<PathBuf>,
        read: impl Fn() -> Result<T, BindError> + Send + Sync + 'static,
    ) -> Result<Arc<Self>, BindError> {
        let stamps = stamps(&files);
        let file = Arc::new(Self { content: RwLock::new(Arc::new(read()?)) });
        tokio::spawn(reload(Arc::downgrade(&file), files, stamps, Arc::new(read)));
        Ok(file)
    }

    pub(crate) fn current(&self) -> Arc<T> {
        Arc::clone(&self.content.read())
    }
}

/// Reads the files again after each change, while their content is in use.
async fn reload<T: Send + Sync + 'static>(
    file: Weak<ReloadingFile<T>>,
    files: Vec<PathBuf>,
    mut seen: Vec<Stamp>,
    read: Arc<impl Fn() -> Result<T, BindError> + Send + Sync + 'static>,
) {
    let mut interval = interval_at(Instant::now() + CHECK_INTERVAL, CHECK_INTERVAL);
    let files = Arc::new(files);
    while file.strong_count() > 0 {
        interval.tick().await;
        let (paths, read, before) = (Arc::clone(&files), Arc::clone(&read), seen.clone());
        // The files may be on a slow file system.
        let found = spawn_blocking(move || {
            let found = stamps(&paths);
            (found != before).then(|| (found, read()))
        });
        let Ok(Some((found, outcome))) = found.await else { continue };
        seen = found;
        let named = Path::display(&files[0]);
        match (outcome, file.upgrade()) {
            (Ok(new), Some(file)) => {
                *file.content.write() = Arc::new(new);
                tracing::info!(file = %named, "reloaded a TLS or token file that has changed");
            }
            (Err(error), Some(_)) => {
                tracing::warn!(
                    file = %named, %error,
                    "cannot use a TLS or token file that has changed; the previous content stays in use until you correct the file"
                );
            }
            (_, None) => return,
        }
    }
}

fn stamps(files: &[PathBuf]) -> Vec<Stamp> {
    let stamp = |file: &PathBuf| {
        let found = fs::metadata(file).ok()?;
        Some([found.ino().cast_signed(), found.size().cast_signed(), found.mtime(), found.mtime_nsec()])
    };
    files.iter().map(stamp).collect()
}
