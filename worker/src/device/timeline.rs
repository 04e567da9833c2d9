//! The arithmetic of the emulated GPU's time: which part of a batch is done when, while the number
//! of SMs that others use changes. Pure: moments are nanoseconds of a clock that the caller reads.

use std::time::Duration;

use shadowslice_shared::profile::Execution;
use shadowslice_shared::units::Sms;

/// A worker's part of the GPU.
#[derive(Debug, Clone, Copy)]
pub struct Share {
    /// The SMs it may use.
    pub own: Sms,
    /// The SMs there are.
    pub gpu: Sms,
}

impl Share {
    /// The SMs it really has while all who execute may use `in_use` together: under contention, its
    /// proportion of the GPU.
    pub fn effective(self, in_use: u64) -> f64 {
        let fits = f64::from(self.gpu.0) / (in_use.max(1) as f64);
        f64::from(self.own.0) * fits.min(1.0)
    }

    /// Whether somebody's effective SMs depend on this one running, with `others` in use besides.
    pub fn contends(self, others: u64) -> bool {
        others + u64::from(self.own.0) > u64::from(self.gpu.0)
    }
}

/// How far a batch is.
#[derive(Debug)]
pub struct Progress<'e> {
    execution: &'e Execution,
    share: Share,
    rows: u32,
    /// Up to when the parts done were counted.
    at_ns: u64,
    /// The part done, 0 to 1.
    done: f64,
    /// What the whole batch takes at the present speed.
    whole_ns: f64,
}

impl<'e> Progress<'e> {
    /// A batch of `rows` rows that starts at `at_ns`, with `in_use` SMs in use.
    pub fn start(execution: &'e Execution, share: Share, rows: u32, at_ns: u64, in_use: u64) -> Self {
        let mut progress = Self { execution, share, rows, at_ns, done: 0.0, whole_ns: 0.0 };
        progress.whole_ns = progress.whole(in_use);
        progress
    }

    /// At `now_ns` the SMs in use have become `in_use`.
    pub fn change(&mut self, now_ns: u64, in_use: u64) {
        let whole_ns = self.whole(in_use);
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

    fn whole(&self, in_use: u64) -> f64 {
        let time = self.execution.time(self.rows, self.share.effective(in_use));
        // No table holds a time of zero; the bound keeps the division above defined all the same.
        time.max(Duration::from_nanos(1)).as_nanos() as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowslice_shared::profile::Row;

    const MS: u64 = 1_000_000;
    const SHARE: Share = Share { own: Sms(60), gpu: Sms(100) };

    /// 600 ms·SM per row, on up to 60 SMs.
    fn execution() -> Execution {
        Execution::new(vec![Sms(60)], vec![Row { batch: 1, ms: vec![10.0] }]).unwrap()
    }

    #[test]
    fn alone_a_batch_takes_what_the_profile_says() {
        let execution = execution();
        let progress = Progress::start(&execution, SHARE, 3, 5 * MS, 60);
        assert_eq!(progress.end_ns(), 35 * MS);
    }

    #[test]
    fn contention_slows_in_proportion_and_only_while_it_lasts() {
        let execution = execution();
        let mut progress = Progress::start(&execution, SHARE, 1, 0, 60);
        progress.change(4 * MS, 120);
        // 6 ms are left of it, at 60 * 100 / 120 = 50 SMs: 7.2 ms.
        assert_eq!(progress.end_ns(), 4 * MS + 7_200_000);
        progress.change(4 * MS + 3_600_000, 60);
        assert_eq!(progress.end_ns(), 4 * MS + 3_600_000 + 3 * MS);
    }

    #[test]
    fn changes_that_change_nothing_do_not_move_the_end() {
        let execution = execution();
        let mut progress = Progress::start(&execution, SHARE, 1, 0, 60);
        for step in 0..10_000 {
            progress.change(step * 1_000, if step % 2 == 0 { 60 } else { 100 });
        }
        assert_eq!(progress.end_ns(), 10 * MS);
    }

    #[test]
    fn time_that_goes_back_or_past_the_end_adds_no_work() {
        let execution = execution();
        let mut progress = Progress::start(&execution, SHARE, 1, 8 * MS, 60);
        progress.change(MS, 60);
        assert_eq!(progress.end_ns(), 18 * MS);
        progress.change(50 * MS, 1_000);
        assert_eq!(progress.end_ns(), 18 * MS, "what is done by then stays done");
    }

    #[test]
    fn shares_contend_when_they_sum_above_the_gpu() {
        assert!(!SHARE.contends(40));
        assert!(SHARE.contends(41));
        assert_eq!(SHARE.effective(0), 60.0);
        assert_eq!(SHARE.effective(100), 60.0);
        assert_eq!(SHARE.effective(200), 30.0);
    }
}
