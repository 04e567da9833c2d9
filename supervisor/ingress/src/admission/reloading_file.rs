//! What files say, read again when they have changed: certificates and tokens are replaced while
//! their server runs.

use std::fmt;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::RwLock;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, interval_at};

/// How often the files are looked at.
const LOOK: Duration = Duration::from_secs(2);

/// Of one file, where there is one.
type Stamp = Option<[i64; 4]>;

pub(crate) struct Renewed<T> {
    now: RwLock<Arc<T>>,
}

impl<T> fmt::Debug for Renewed<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Renewed").finish_non_exhaustive()
    }
}

impl<T: Send + Sync + 'static> Renewed<T> {
    /// Files that cannot be used later leave what was read last. Must be called on a Tokio runtime.
    pub(crate) fn read<E: fmt::Display + Send + 'static>(
        files: Vec<PathBuf>,
        read: impl Fn() -> Result<T, E> + Send + Sync + 'static,
    ) -> Result<Arc<Self>, E> {
        let stamps = stamps(&files);
        let renewed = Arc::new(Self { now: RwLock::new(Arc::new(read()?)) });
        tokio::spawn(follow(Arc::downgrade(&renewed), files, stamps, Arc::new(read)));
        Ok(renewed)
    }

    pub(crate) fn now(&self) -> Arc<T> {
        Arc::clone(&self.now.read())
    }
}

/// Ends when what was read is no longer used.
async fn follow<T: Send + Sync + 'static, E: fmt::Display + Send + 'static>(
    renewed: Weak<Renewed<T>>,
    files: Vec<PathBuf>,
    mut seen: Vec<Stamp>,
    read: Arc<impl Fn() -> Result<T, E> + Send + Sync + 'static>,
) {
    let mut look = interval_at(Instant::now() + LOOK, LOOK);
    let files = Arc::new(files);
    while renewed.strong_count() > 0 {
        look.tick().await;
        let (looked, read, before) = (Arc::clone(&files), Arc::clone(&read), seen.clone());
        // Files may lie where a look at them takes long.
        let found = spawn_blocking(move || {
            let found = stamps(&looked);
            (found != before).then(|| (found, read()))
        });
        let Ok(Some((found, outcome))) = found.await else { continue };
        seen = found;
        let named = Path::display(&files[0]);
        match (outcome, renewed.upgrade()) {
            (Ok(new), Some(renewed)) => {
                *renewed.now.write() = Arc::new(new);
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
