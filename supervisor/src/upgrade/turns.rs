//! Models whose workers start one after the other.

use std::sync::Arc;

use tokio::sync::{Semaphore, mpsc};

use shadowslice_control::controller::ControllerTask;

/// Lets controllers through to the control thread.
#[derive(Debug)]
pub(crate) struct Turnstile(Arc<Semaphore>);

impl Turnstile {
    /// In front of `hire`, where `most` controllers may wait.
    pub(crate) fn before(
        hire: mpsc::Sender<ControllerTask>,
        most: usize,
    ) -> (Self, mpsc::Sender<ControllerTask>) {
        let (enter, mut waiting) = mpsc::channel(most);
        let turns = Arc::new(Semaphore::new(0));
        let through = Arc::clone(&turns);
        tokio::spawn(async move {
            while let Some(controller) = waiting.recv().await {
                // An error means that all may pass.
                if let Ok(turn) = through.acquire().await {
                    turn.forget();
                }
                if hire.send(controller).await.is_err() {
                    return;
                }
            }
        });
        (Self(turns), enter)
    }

    /// Lets one through, in the order in which they came.
    pub(crate) fn next(&self) {
        self.0.add_permits(1);
    }

    /// Lets all through, also those to come.
    pub(crate) fn open(&self) {
        self.0.close();
    }
}
