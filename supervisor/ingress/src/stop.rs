//! The end of serving, as connections see it.

use std::time::Duration;

use tokio::sync::watch;

/// Tells when serving is to end.
#[derive(Debug, Clone)]
pub(super) struct Stop {
    told: watch::Receiver<bool>,
    drain: Duration,
}

impl Stop {
    /// Connections may take `drain` to end: requests under way, and a peer that does not read its answer.
    pub(super) fn new(told: watch::Receiver<bool>, drain: Duration) -> Self {
        Self { told, drain }
    }

    /// Waits until serving is to end.
    pub(super) async fn begun(mut self) {
        // An error means that the sender is gone: that is the end, too.
        let _ = self.told.wait_for(|stop| *stop).await;
    }

    /// Waits until connections must have ended.
    pub(super) async fn overdue(self) {
        let drain = self.drain;
        self.begun().await;
        tokio::time::sleep(drain).await;
    }
}
