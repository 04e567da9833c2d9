//! Stall: the time in which a batch was ready and a slot free, and no lane took it.

use std::time::Duration;

use shadowslice_shared::units::Timestamp;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stall {
    pub total: Duration,
    /// The longest in one piece.
    pub longest: Duration,
}

#[derive(Debug, Default)]
pub(crate) struct StallMeter {
    since: Option<Timestamp>,
    seen: Stall,
}

impl StallMeter {
    pub(crate) fn begin(&mut self, now: Timestamp) {
        self.begin_at_outage();
        self.since = self.since.map(|_| now);
    }

    /// Begins a new window with a stall that is going on, from when that began.
    pub(crate) fn begin_at_outage(&mut self) {
        self.seen = Stall::default();
    }

    /// `stalled`: after an attempt to dispatch, a ready batch was left though no lane was full.
    pub(crate) fn note(&mut self, stalled: bool, now: Timestamp) {
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
        meter.note(true, at(5));
        meter.begin(at(10));
        meter.note(true, at(12));
        meter.note(false, at(14));
        meter.note(false, at(20));
        meter.note(true, at(30));
        let ms = Duration::from_millis;
        assert_eq!(meter.read(at(33)), Stall { total: ms(7), longest: ms(4) });
        meter.begin(at(40));
        assert_eq!(meter.read(at(41)), Stall { total: ms(1), longest: ms(1) });
        meter.begin_at_outage();
        assert_eq!(meter.read(at(42)), Stall { total: ms(2), longest: ms(2) });
    }
}
