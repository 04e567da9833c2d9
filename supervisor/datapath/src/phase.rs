//! The phase of the supervisor's life.
//!
//! ```text
//! Starting ────┐
//!              ├──▶ Serving ──▶ LameDuck ──▶ Stopping
//! TakingOver ──┘     │   ▲
//!                    ▼   │ the upgrade failed
//!                HandingOver ──▶ Leaving
//! ```
//!
//! A signal to stop leads from every phase to `Stopping`. The supervisor passes through `LameDuck` only
//! if it serves and the signal is SIGTERM.

use tokio::sync::watch;

/// The phase of the supervisor's life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The models are created. No client is served yet.
    Starting,
    /// The previous supervisor hands its models over.
    TakingOver,
    /// Clients are served.
    Serving,
    /// Clients are served, but the host reports that it is not ready, so that load balancers send no
    /// more requests.
    LameDuck,
    /// Clients are served, and models move to the next supervisor.
    HandingOver,
    /// The next supervisor listens on the same sockets. The connections of this supervisor are served
    /// until they end.
    Leaving,
    /// No supervisor listens. Accepted requests are answered.
    Stopping,
}

/// A receiver of the phase.
pub type PhaseReceiver = watch::Receiver<Phase>;

impl Phase {
    /// Returns true while models move from one supervisor to another. Changes of models are refused
    /// then, because the other supervisor would not know them.
    pub fn is_upgrading(self) -> bool {
        matches!(self, Self::TakingOver | Self::HandingOver)
    }

    /// Returns true while this supervisor, and no other one, answers operators and writes the persisted
    /// state.
    pub fn is_in_charge(self) -> bool {
        self == Self::Starting || self.is_accepting()
    }

    /// Returns true while this supervisor accepts connections.
    pub fn is_accepting(self) -> bool {
        matches!(self, Self::Serving | Self::LameDuck | Self::HandingOver)
    }

    /// Returns true if this supervisor no longer accepts connections.
    pub fn has_ended(self) -> bool {
        matches!(self, Self::Leaving | Self::Stopping)
    }
}

/// Waits until the supervisor has reached a phase that fulfils the condition. If the sender is gone,
/// waits forever.
pub async fn reached(mut phase_rx: PhaseReceiver, condition: impl FnMut(&Phase) -> bool) {
    if phase_rx.wait_for(condition).await.is_err() {
        std::future::pending().await
    }
}
