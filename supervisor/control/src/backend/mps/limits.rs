//! How long MPS is waited for.

use std::time::Duration;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Until a new daemon's server takes clients: the driver may have to come up first.
    pub start: Duration,
    /// Until the daemon has answered a command.
    pub command: Duration,
    /// Until the daemon has ended after it was told to quit and its clients have gone.
    pub quit: Duration,
    /// Until a worker's work is off the GPU; then it is killed all the same.
    pub terminate: Duration,
    /// Until a worker that has exited is no client any more.
    pub departure: Duration,
    /// Until a server at fault has recovered; then its daemon is restarted.
    pub fault: Duration,
    /// Until a worker that lost its context has found out by itself; then it is killed.
    pub lost: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self {
            start: seconds(30),
            command: seconds(10),
            quit: seconds(5),
            terminate: seconds(3),
            departure: seconds(10),
            fault: seconds(10),
            lost: seconds(1),
        }
    }
}
