//! Limits how often a message is logged.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// A limit on how often a message is logged, so that clients cannot fill the log.
#[derive(Debug)]
pub struct LogThrottle {
    /// The shortest time between two messages.
    interval: Duration,
    last: Mutex<Option<Instant>>,
}

impl LogThrottle {
    pub fn new(interval: Duration) -> Self {
        Self { interval, last: Mutex::new(None) }
    }

    /// Returns true if the message may be logged now, and starts the next interval.
    pub fn is_due(&self) -> bool {
        let mut last = self.last.lock();
        let is_due = last.is_none_or(|last| last.elapsed() >= self.interval);
        if is_due {
            *last = Some(Instant::now());
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_message_is_due_in_each_interval() {
        let rare = LogThrottle::new(Duration::from_secs(3600));
        assert_eq!([rare.is_due(), rare.is_due()], [true, false]);
        let free = LogThrottle::new(Duration::ZERO);
        assert_eq!([free.is_due(), free.is_due()], [true, true]);
    }
}
