//! The heartbeat of the control thread. If this thread stops, requests are still answered, but dead
//! workers are not replaced.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::clock::Clock;

/// The interval between two beats of the control thread.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(500);

/// The time without a beat after which the control thread is considered stalled.
pub const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(5);

/// The heartbeat of the control thread. All clones share the same heartbeat.
#[derive(Debug, Clone)]
pub struct Heartbeat {
    clock: Clock,
    /// The time of the last beat, in ms since the clock's origin.
    last_beat_ms: Arc<AtomicU64>,
}

impl Heartbeat {
    /// Creates a heartbeat whose last beat is now.
    pub fn new(clock: Clock) -> Self {
        let heartbeat = Self { clock, last_beat_ms: Arc::default() };
        heartbeat.beat();
        heartbeat
    }

    pub fn beat(&self) {
        self.last_beat_ms.store(self.now_ms(), Ordering::Relaxed);
    }

    /// Returns whether the last beat is less than [`HEARTBEAT_TIMEOUT`] ago.
    pub fn is_alive(&self) -> bool {
        let silence =
            Duration::from_millis(self.now_ms().saturating_sub(self.last_beat_ms.load(Ordering::Relaxed)));
        silence < HEARTBEAT_TIMEOUT
    }

    fn now_ms(&self) -> u64 {
        self.clock.now().since_origin().as_millis() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_not_alive_five_seconds_after_the_last_beat() {
        let heartbeat =
            Heartbeat { clock: Clock::started(Duration::from_secs(6)), last_beat_ms: Arc::default() };
        assert!(!heartbeat.is_alive());
        heartbeat.beat();
        assert!(heartbeat.is_alive());
    }
}
