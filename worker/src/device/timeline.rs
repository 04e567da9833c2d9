//! The arithmetic of the emulated GPU's time: which part of a batch is done when, while the number
//! of SMs that it has changes. Pure: moments are nanoseconds of a clock that the caller reads.

use std::time::Duration;

use shadowslice_shared::profile::Execution;

/// How far a batch is.
#[derive(Debug)]
pub struct Progress<'e> {
    execution: &'e Execution,
    rows: u32,
    /// Up to when the parts done were counted.
    at_ns: u64,
    /// The part done, 0 to 1.
    done: f64,
    /// What the whole batch takes at the present speed.
    whole_ns: f64,
}

impl<'e> Progress<'e> {
    /// A batch of `rows` rows that starts at `at_ns`, on so many SMs, or parts of them.
    pub fn start(execution: &'e Execution, rows: u32, at_ns: u64, sms: f64) -> Self {
        let mut progress = Self { execution, rows, at_ns, done: 0.0, whole_ns: 0.0 };
        progress.whole_ns = progress.whole(sms);
        progress
    }

    /// At `now_ns` it has become so many SMs.
    pub fn change(&mut self, now_ns: u64, sms: f64) {
        let whole_ns = self.whole(sms);
        // As long as the speed stays, nothing is rounded.
        if whole_ns != self.whole_ns {
            let now_ns = now_ns.clamp(self.at_ns, self.end_ns());
            self.done += (now_ns - self.at_ns) as f64 / self.whole_ns;
            self.at_ns = now_ns;
            self.whole_ns = whole_ns;
        }
    }

    /// When it will be through if nothing changes.
    pub fn end_ns(&self) -> u64 {
        self.at_ns.saturating_add(((1.0 - self.done).max(0.0) * self.whole_ns).round() as u64)
    }

    fn whole(&self, sms: f64) -> f64 {
        let time = self.execution.time(self.rows, sms);
        // No table holds a time of zero; the bound keeps the division above defined all the same.
        time.max(Duration::from_nanos(1)).as_nanos() as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowslice_shared::profile::Row;
    use shadowslice_shared::units::Sms;

    const MS: u64 = 1_000_000;

    /// 600 ms·SM per row, on up to 60 SMs.
    fn execution() -> Execution {
        Execution::new(vec![Sms(60)], vec![Row { batch: 1, ms: vec![10.0] }]).unwrap()
    }

    #[test]
    fn alone_a_batch_takes_what_the_profile_says() {
        let execution = execution();
        let progress = Progress::start(&execution, 3, 5 * MS, 60.0);
        assert_eq!(progress.end_ns(), 35 * MS);
    }

    #[test]
    fn contention_slows_in_proportion_and_only_while_it_lasts() {
        let execution = execution();
        let mut progress = Progress::start(&execution, 1, 0, 60.0);
        progress.change(4 * MS, 50.0);
        // 6 ms are left of it, at 50 SMs: 7.2 ms.
        assert_eq!(progress.end_ns(), 4 * MS + 7_200_000);
        progress.change(4 * MS + 3_600_000, 60.0);
        assert_eq!(progress.end_ns(), 4 * MS + 3_600_000 + 3 * MS);
    }

    #[test]
    fn changes_that_change_nothing_do_not_move_the_end() {
        let execution = execution();
        let mut progress = Progress::start(&execution, 1, 0, 60.0);
        for step in 0..10_000 {
            progress.change(step * 1_000, 60.0);
        }
        assert_eq!(progress.end_ns(), 10 * MS);
    }

    #[test]
    fn time_that_goes_back_or_past_the_end_adds_no_work() {
        let execution = execution();
        let mut progress = Progress::start(&execution, 1, 8 * MS, 60.0);
        progress.change(MS, 60.0);
        assert_eq!(progress.end_ns(), 18 * MS);
        progress.change(50 * MS, 6.0);
        assert_eq!(progress.end_ns(), 18 * MS, "what is done by then stays done");
    }
}
