//! Reads files with a time limit. A pipe without a writer, or a file system whose server is gone, may
//! block forever.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, oneshot};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::timeout;

use crate::process::LoadedFiles;

/// The maximum time of a read.
const READ_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(super) struct FileReader {
    /// The thread of a read that took too long.
    stuck: Option<JoinHandle<()>>,
    /// The permit to compute digests. Only one core does that at a time, so that serving keeps the other
    /// cores.
    digesting: Arc<Semaphore>,
}

impl Default for FileReader {
    fn default() -> Self {
        Self { stuck: None, digesting: Arc::new(Semaphore::new(1)) }
    }
}

impl FileReader {
    /// Computes the files' digests in the background.
    pub(super) fn digest(&self, files: &Arc<LoadedFiles>) {
        let (turn, files) = (Arc::clone(&self.digesting), Arc::clone(files));
        tokio::spawn(async move {
            let _turn = turn.acquire_owned().await;
            // A panic leaves the digests unknown, which is allowed.
            spawn_blocking(move || files.digest()).await.ok();
        });
    }

    /// Runs `read` in a thread of its own. At most one thread is left behind. Until it has ended, other
    /// reads fail.
    ///
    /// # Errors
    ///
    /// Returns the reason if the read has not finished in time, or panics.
    pub(super) async fn read<T: Send + 'static>(
        &mut self,
        read: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, String> {
        if self.stuck.as_ref().is_some_and(|stuck| !stuck.is_finished()) {
            return Err(
                "an earlier read has not finished; check the file system that holds the files".to_owned()
            );
        }
        let (tell, told) = oneshot::channel();
        let reading = spawn_blocking(move || {
            tell.send(read()).ok();
        });
        match timeout(READ_TIMEOUT, told).await {
            Ok(Ok(read)) => Ok(read),
            Ok(Err(_)) => {
                Err("cannot read the files because of a bug in shadowslice; please report it with the log"
                    .to_owned())
            }
            Err(_) => {
                self.stuck = Some(reading);
                Err(format!(
                    "reading the files timed out after {} s; check for a pipe, or for a file system that does not respond",
                    READ_TIMEOUT.as_secs()
                ))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::sync_channel;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_read_may_be_left_behind_and_others_go_on_after_it() {
        let mut files = FileReader::default();
        assert_eq!(files.read(|| 1).await, Ok(1));
        let (end, ended) = sync_channel::<()>(1);
        let read = files.read(move || ended.recv().is_err());
        let (read, ()) = tokio::join!(read, tokio::time::advance(READ_TIMEOUT * 2));
        let why = read.unwrap_err();
        assert!(why.contains("10 s"), "{why}");
        assert!(files.read(|| 2).await.unwrap_err().contains("earlier"));
        drop(end);
        while !files.stuck.as_ref().unwrap().is_finished() {
            tokio::task::yield_now().await;
        }
        assert_eq!(files.read(|| 3).await, Ok(3));
    }

    #[tokio::test]
    async fn a_read_that_panics_is_reported() {
        assert!(FileReader::default().read(|| panic!("here")).await.is_err());
    }
}
