//! The end of serving, as connections see it.

use std::time::Duration;

use tokio::sync::watch;

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
pub(crate) struct Stop {
    told: watch::Receiver<Course>,
    drain: Duration,
    keep_alive: Duration,
}

impl Stop {
    /// `drain` is for requests under way, and for peers that do not read their answers; `keep_alive`
    /// is how long an HTTP connection may be idle.
    pub(crate) fn new(told: watch::Receiver<Course>, drain: Duration, keep_alive: Duration) -> Self {
        Self { told, drain, keep_alive }
    }

    /// Returns how long an HTTP connection may be idle, at any time, also once another supervisor
    /// listens. A client that sends a request meanwhile is answered, and told to connect again. If
    /// its connection were closed sooner, it might send just then, and lose a request.
    pub(crate) fn keep_alive(&self) -> Duration {
        self.keep_alive
    }

    pub(crate) async fn begun(mut self) {
        // An error means that the sender is gone: that is the end, too.
        let _ = self.told.wait_for(|course| *course != Course::Serve).await;
    }

    /// Returns when HTTP connections end that have no request under way.
    pub(crate) async fn ends_idle(mut self) {
        self.clone().begun().await;
        if self.leaves() {
            // Either is the end.
            let _ =
                tokio::time::timeout(self.keep_alive, self.told.wait_for(|course| *course == Course::Stop))
                    .await;
        }
    }

    pub(crate) fn leaves(&self) -> bool {
        *self.told.borrow() == Course::Leave
    }

    pub(crate) async fn overdue(self) {
        let drain = self.drain;
        self.ends_idle().await;
        tokio::time::sleep(drain).await;
    }
}
