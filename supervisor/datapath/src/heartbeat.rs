//! Whether the control thread moves. Without it requests are still answered, but no worker that
//! dies is replaced.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::clock::Clock;

/// How often the control thread says that it moves.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(500);

/// After so long without a word it counts as standing still.
pub const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug, Clone)]
pub struct Heartbeat {
    clock: Clock,
    /// In ms since the clock's origin.
    last_beat_ms: Arc<AtomicU64>,
}

impl Heartbeat {
    /// It has moved just now.
    pub fn new(clock: Clock) -> Self {
        let heartbeat = Self { clock, last_beat_ms: Arc::default() };
        heartbeat.beat();
        heartbeat
    }

    pub fn beat(&self) {
        self.last_beat_ms.store(self.now_ms(), Ordering::Relaxed);
    }

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
    fn it_stands_still_after_five_seconds_without_a_word() {
        let heartbeat =
            Heartbeat { clock: Clock::started(Duration::from_secs(6)), last_beat_ms: Arc::default() };
        assert!(!heartbeat.is_alive());
        heartbeat.beat();
        assert!(heartbeat.is_alive());
    }
}
