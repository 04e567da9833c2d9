//! The end of serving, as connections see it.

use std::time::Duration;

use tokio::sync::watch;

#[derive(Debug, Clone)]
pub(super) struct Stop {
    told: watch::Receiver<bool>,
    drain: Duration,
}

impl Stop {
    /// `drain` is for requests under way, and for peers that do not read their answers.
    pub(super) fn new(told: watch::Receiver<bool>, drain: Duration) -> Self {
        Self { told, drain }
    }

    pub(super) async fn begun(mut self) {
        // An error means that the sender is gone: that is the end, too.
        let _ = self.told.wait_for(|stop| *stop).await;
    }

    pub(super) async fn overdue(self) {
        let drain = self.drain;
        self.begun().await;
        tokio::time::sleep(drain).await;
    }
}
