//! The clock that all parts of the supervisor use.

use std::time::{Duration, Instant};

use shadowslice_shared::units::Timestamp;

/// A monotonic clock that starts when the supervisor starts.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    origin: Instant,
}

impl Clock {
    pub fn start() -> Self {
        Self { origin: Instant::now() }
    }

    #[cfg(test)]
    pub(crate) fn started(ago: Duration) -> Self {
        Self { origin: Instant::now().checked_sub(ago).expect("tests run later than that after boot") }
    }

    pub fn now(&self) -> Timestamp {
        Timestamp::after_origin(self.origin.elapsed())
    }

    pub fn instant(&self, moment: Timestamp) -> tokio::time::Instant {
        tokio::time::Instant::from_std(self.origin + moment.since_origin())
    }
}

/// Returns the monotonic time in ns since boot. Workers use the same clock.
pub fn monotonic_ns() -> u64 {
    let now = nix::time::ClockId::CLOCK_MONOTONIC.now().map(Duration::from);
    now.map_or(0, |now| u64::try_from(now.as_nanos()).unwrap_or(u64::MAX))
}
