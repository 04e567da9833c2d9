//! The end of serving, as connections see it.

use std::time::Duration;

use tokio::sync::watch;

/// How long an HTTP connection may lie idle once another supervisor listens, as it may at any time.
/// Whoever asks on it meanwhile is answered, and told to connect anew; if it were closed sooner, its
/// client might ask just then, and lose a request.
pub(super) const IDLE: Duration = Duration::from_secs(75);

/// What becomes of serving.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Course {
    #[default]
    Serve,
    /// Another supervisor listens on the same sockets; what has been connected here is served to its
    /// end.
    Leave,
    /// Nobody listens any more.
    Stop,
}

#[derive(Debug, Clone)]
pub(super) struct Stop {
    told: watch::Receiver<Course>,
    drain: Duration,
}

impl Stop {
    /// `drain` is for requests under way, and for peers that do not read their answers.
    pub(super) fn new(told: watch::Receiver<Course>, drain: Duration) -> Self {
        Self { told, drain }
    }

    pub(super) async fn begun(mut self) {
        // An error means that the sender is gone: that is the end, too.
        let _ = self.told.wait_for(|course| *course != Course::Serve).await;
    }

    /// Returns when HTTP connections end that have no request under way.
    pub(super) async fn ends_idle(mut self) {
        self.clone().begun().await;
        if self.leaves() {
            // Either is the end.
            let _ = tokio::time::timeout(IDLE, self.told.wait_for(|course| *course == Course::Stop)).await;
        }
    }

    pub(super) fn leaves(&self) -> bool {
        *self.told.borrow() == Course::Leave
    }

    pub(super) async fn overdue(self) {
        let drain = self.drain;
        self.ends_idle().await;
        tokio::time::sleep(drain).await;
    }
}
