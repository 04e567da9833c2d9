//! The end of serving, as connections see it.

use std::time::Duration;

use shadowslice_datapath::phase::{Phase, PhaseReceiver};

#[derive(Debug, Clone)]
pub(crate) struct Stop {
    phase_rx: PhaseReceiver,
    drain: Duration,
    keep_alive: Duration,
}

impl Stop {
    /// Creates the end of serving, which begins when `phase_rx` says so. `drain` is the time for
    /// requests in flight, and for peers that do not read their answers. `keep_alive` is the time
    /// that an HTTP connection may be idle.
    pub(crate) fn new(phase_rx: PhaseReceiver, drain: Duration, keep_alive: Duration) -> Self {
        Self { phase_rx, drain, keep_alive }
    }

    /// Returns the time that an HTTP connection may be idle. It also applies after another
    /// supervisor has begun to listen. A client that sends a request until then is answered, and is
    /// asked to connect again. If the connection were closed sooner, the client might send just
    /// then, and lose its request.
    pub(crate) fn keep_alive(&self) -> Duration {
        self.keep_alive
    }

    pub(crate) async fn begun(mut self) {
        // An error means that the sender is gone, which also ends serving.
        let _ = self.phase_rx.wait_for(|phase| phase.has_ended()).await;
    }

    /// Waits until HTTP connections without a request must end.
    pub(crate) async fn ends_idle(mut self) {
        self.clone().begun().await;
        if self.hands_over() {
            // Both outcomes end idle connections.
            let _ = tokio::time::timeout(
                self.keep_alive,
                self.phase_rx.wait_for(|phase| *phase == Phase::Stopping),
            )
            .await;
        }
    }

    /// Returns whether another supervisor has begun to listen.
    pub(crate) fn hands_over(&self) -> bool {
        *self.phase_rx.borrow() == Phase::Leaving
    }

    /// Waits until all connections must be closed.
    pub(crate) async fn overdue(self) {
        let drain = self.drain;
        self.ends_idle().await;
        tokio::time::sleep(drain).await;
    }
}
