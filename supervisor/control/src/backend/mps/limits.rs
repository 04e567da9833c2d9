//! The timeouts of operations on MPS.

use std::time::Duration;

/// The timeouts of operations on MPS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The time within which a new daemon's server must accept clients, including the driver's
    /// start.
    pub start: Duration,
    /// The time within which the daemon must answer a command.
    pub command: Duration,
    /// The time within which the daemon must exit after `quit` and the exit of its clients.
    pub quit: Duration,
    /// The time within which a worker's GPU work must end. After it, the worker is killed anyway.
    pub terminate: Duration,
    /// The time within which MPS must remove a worker that has exited from its clients.
    pub departure: Duration,
    /// The time within which a faulty server must recover. After it, the daemon is restarted.
    pub fault: Duration,
    /// The time within which a worker that lost its context must exit. After it, the worker is
    /// killed.
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
