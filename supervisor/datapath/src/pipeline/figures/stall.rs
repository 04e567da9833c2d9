//! The stall of a model: the time in which a batch was ready and a slot was free, but no lane took
//! the batch.

use std::time::Duration;

use shadowslice_shared::units::Timestamp;

/// The stall within a measurement window.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stall {
    pub total: Duration,
    /// The longest uninterrupted stall.
    pub longest: Duration,
}

#[derive(Debug, Default)]
pub(crate) struct StallMeter {
    since: Option<Timestamp>,
    seen: Stall,
}

impl StallMeter {
    /// Starts a new measurement window at `now`.
    pub(crate) fn begin(&mut self, now: Timestamp) {
        self.begin_at_outage();
        self.since = self.since.map(|_| now);
    }

    /// Starts a new measurement window. If a stall is in progress, the window includes the whole
    /// stall.
    pub(crate) fn begin_at_outage(&mut self) {
        self.seen = Stall::default();
    }

    /// Updates the stall after an attempt to send batches. `stalled` is true if a ready batch was
    /// not sent although no lane was full.
    pub(crate) fn update(&mut self, stalled: bool, now: Timestamp) {
        match (self.since, stalled) {
            (None, true) => self.since = Some(now),
            (Some(since), false) => {
                self.add(now.since(since));
                self.since = None;
            }
            _ => {}
        }
    }

    pub(crate) fn read(&self, now: Timestamp) -> Stall {
        let mut seen = Self { since: None, seen: self.seen };
        if let Some(since) = self.since {
            seen.add(now.since(since));
        }
        seen.seen
    }

    fn add(&mut self, span: Duration) {
        self.seen.total += span;
        self.seen.longest = self.seen.longest.max(span);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Timestamp {
        Timestamp::after_origin(Duration::from_millis(ms))
    }

    #[test]
    fn only_time_in_which_a_batch_was_left_counts() {
        let mut meter = StallMeter::default();
        meter.update(true, at(5));
        meter.begin(at(10));
        meter.update(true, at(12));
        meter.update(false, at(14));
        meter.update(false, at(20));
        meter.update(true, at(30));
        let ms = Duration::from_millis;
        assert_eq!(meter.read(at(33)), Stall { total: ms(7), longest: ms(4) });
        meter.begin(at(40));
        assert_eq!(meter.read(at(41)), Stall { total: ms(1), longest: ms(1) });
        meter.begin_at_outage();
        assert_eq!(meter.read(at(42)), Stall { total: ms(2), longest: ms(2) });
    }
}
