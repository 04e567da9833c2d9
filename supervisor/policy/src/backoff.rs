//! The delay before another attempt after a failure.

use std::time::Duration;

/// A delay that starts at a minimum and doubles with each consecutive failure, up to a maximum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backoff {
    min: Duration,
    max: Duration,
    /// The delay after the last failure. It is zero if there was none.
    delay: Duration,
}

impl Backoff {
    /// Creates the back-off of something that has not failed.
    pub const fn new(min: Duration, max: Duration) -> Self {
        Self { min, max, delay: Duration::ZERO }
    }

    /// Records a failure. Returns the delay before the next attempt.
    pub fn record_failure(&mut self) -> Duration {
        self.delay = (self.delay * 2).clamp(self.min, self.max);
        self.delay
    }

    /// Returns the delay after the last failure.
    pub fn delay(&self) -> Duration {
        self.delay
    }

    /// Forgets all failures.
    pub fn reset(&mut self) {
        self.delay = Duration::ZERO;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_delay_doubles_within_its_bounds_until_it_is_reset() {
        let ms = Duration::from_millis;
        let mut backoff = Backoff::new(ms(10), ms(50));
        assert_eq!(backoff.delay(), Duration::ZERO);
        for expected in [10, 20, 40, 50, 50] {
            assert_eq!((backoff.record_failure(), backoff.delay()), (ms(expected), ms(expected)));
        }
        backoff.reset();
        assert_eq!(backoff.record_failure(), ms(10));
    }
}
