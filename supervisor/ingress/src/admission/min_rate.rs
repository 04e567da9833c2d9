//! The minimum rate at which a peer must send and read. A client that moves a byte from time to
//! time would otherwise keep its memory and its place for ever.

use std::time::Duration;

use tokio::time::Instant;

/// The time that a peer may be silent during a request, or read nothing of an answer.
pub(crate) const SILENCE_TIMEOUT: Duration = Duration::from_secs(30);

/// The minimum rate of a connection after one silence, in bytes per second.
pub(crate) const MIN_CONNECTION_RATE: f64 = 64.0 * 1024.0;

/// The minimum rate of each stream of a connection, in bytes per second.
pub(crate) const MIN_STREAM_RATE: f64 = 1024.0;

/// The time at which a peer that makes too little progress is given up.
#[derive(Debug)]
pub(crate) struct ProgressDeadline {
    at: Instant,
    /// The end of the transfer at the minimum rate.
    at_min_rate: Instant,
}

impl ProgressDeadline {
    pub(crate) fn new() -> Self {
        let at = Instant::now() + SILENCE_TIMEOUT;
        Self { at, at_min_rate: at }
    }

    pub(crate) fn at(&self) -> Instant {
        self.at
    }

    /// Moves the deadline, because the peer has moved some bytes. `min_rate` is in bytes per
    /// second.
    pub(crate) fn record_progress(&mut self, bytes: usize, min_rate: f64) {
        self.at_min_rate += Duration::from_secs_f64(bytes as f64 / min_rate);
        self.at = self.at_min_rate.min(Instant::now() + SILENCE_TIMEOUT);
    }
}
