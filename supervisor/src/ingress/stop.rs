//! The end of serving, as connections see it.

use std::time::Duration;

use tokio::sync::watch;

/// How long a connection may take to end once serving is to end: requests under way, and a peer that
/// does not read its answer.
pub(super) const DRAIN: Duration = Duration::from_secs(30);

/// Tells when serving is to end.
#[derive(Debug, Clone)]
pub(super) struct Stop(watch::Receiver<bool>);

impl Stop {
    pub(super) fn new(stop: watch::Receiver<bool>) -> Self {
        Self(stop)
    }

    /// Waits until serving is to end.
    pub(super) async fn begun(mut self) {
        // An error means that nobody is left to say so: it is the end, too.
        let _ = self.0.wait_for(|stop| *stop).await;
    }

    /// Waits until connections must have ended.
    pub(super) async fn overdue(self) {
        self.begun().await;
        tokio::time::sleep(DRAIN).await;
    }
}
