//! The timeline of the emulated GPU. It computes the progress of a batch, whose speed depends on
//! the other workers that are executing. This module does no I/O: the caller passes times in ns.

use std::time::Duration;

/// The progress of one batch.
#[derive(Debug)]
pub struct BatchProgress {
    /// The time for which `done` is valid, in ns.
    at_ns: u64,
    /// The completed fraction of the batch, from 0 to 1.
    done: f64,
    /// The duration of the whole batch at the current speed, in ns.
    whole_ns: f64,
}

impl BatchProgress {
    /// Starts a batch that takes `whole` in total, unless its speed changes.
    pub fn start(at_ns: u64, whole: Duration) -> Self {
        Self { at_ns, done: 0.0, whole_ns: nanos(whole) }
    }

    /// Changes the speed at `now_ns`. At the new speed, the whole batch would take `whole`.
    pub fn change(&mut self, now_ns: u64, whole: Duration) {
        let whole_ns = nanos(whole);
        // Without this condition, a rounding error would occur even if the speed had not changed.
        if whole_ns != self.whole_ns {
            let now_ns = now_ns.clamp(self.at_ns, self.end_ns());
            self.done += (now_ns - self.at_ns) as f64 / self.whole_ns;
            self.at_ns = now_ns;
            self.whole_ns = whole_ns;
        }
    }

    pub fn end_ns(&self) -> u64 {
        self.reaches_ns(1.0)
    }

    /// Returns the time at which the batch is complete up to `fraction`, at the current speed.
    pub fn reaches_ns(&self, fraction: f64) -> u64 {
        self.at_ns.saturating_add(((fraction - self.done).max(0.0) * self.whole_ns).round() as u64)
    }

    /// Continues at `now_ns` after a pause, during which the batch was complete up to `fraction`.
    pub fn resume(&mut self, fraction: f64, now_ns: u64) {
        (self.done, self.at_ns) = (fraction, now_ns);
    }
}

/// Converts a duration to nanoseconds, but to at least one. Profiles contain no times of zero, but
/// this lower bound guarantees that the division above never divides by zero.
fn nanos(whole: Duration) -> f64 {
    whole.max(Duration::from_nanos(1)).as_nanos() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const TEN: Duration = Duration::from_millis(10);

    #[test]
    fn others_slow_a_batch_only_while_they_are_there() {
        let mut progress = BatchProgress::start(0, TEN);
        progress.change(4 * MS, Duration::from_millis(20));
        // After 4 of 10 ms, the speed halves, so the remaining 6 ms take 12 ms.
        assert_eq!(progress.end_ns(), 16 * MS);
        progress.change(10 * MS, TEN);
        assert_eq!(progress.end_ns(), 13 * MS);
    }

    #[test]
    fn changes_that_change_nothing_do_not_move_the_end() {
        let mut progress = BatchProgress::start(0, TEN);
        for step in 0..10_000 {
            progress.change(step * 1_000, TEN);
        }
        assert_eq!(progress.end_ns(), 10 * MS);
    }

    #[test]
    fn a_pause_postpones_the_rest() {
        let mut progress = BatchProgress::start(0, TEN);
        progress.change(MS, Duration::from_millis(20));
        assert_eq!(progress.reaches_ns(0.5), 9 * MS);
        progress.resume(0.5, 12 * MS);
        assert_eq!((progress.reaches_ns(0.25), progress.end_ns()), (12 * MS, 22 * MS));
    }

    #[test]
    fn time_that_goes_back_or_past_the_end_adds_no_work() {
        let mut progress = BatchProgress::start(8 * MS, TEN);
        progress.change(MS, TEN);
        assert_eq!(progress.end_ns(), 18 * MS);
        progress.change(50 * MS, 10 * TEN);
        assert_eq!(progress.end_ns(), 18 * MS, "what is done by then stays done");
    }
}
