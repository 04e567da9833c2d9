//! Execution times without a profile.
//!
//! The form is `t(rows, sms) = fixed + work * rows / min(sms, knee)`: a part that no SM speeds up, and
//! work that is divided among SMs up to a knee. At one share both parts of the line over the rows are
//! seen, where batches of different sizes were; until a second share was seen, all of the GPU is taken
//! to help. Then the knee is where the work per row stops falling, so that every hand-over that the
//! policy asks for anyway teaches it, and none is made only to learn.

use super::curve::{Line, Sample};

/// Shares remembered.
const MAX_SHARES: usize = 8;

/// Batches of a share beyond which what was seen before weighs half.
const MEMORY: f64 = 2_000.0;

/// Work per row that is higher by this part at a larger share is a knee, and no noise.
const KNEE_SEEN: f64 = 1.15;

/// What was learnt.
#[derive(Debug, Clone, Default)]
pub(super) struct Learnt {
    /// One by cap.
    shares: Vec<Regression>,
}

/// Sums of a linear regression of seconds over rows, in which older batches weigh less. A row that neighbours left half of the cap is as
/// much work as two with all of it, and counts as such: who executes most when they do would else seem to have a large fixed part.
#[derive(Debug, Clone, Copy, Default)]
struct Regression {
    /// In SMs.
    cap: u32,
    /// Batches, and the sums over them.
    count: f64,
    rows: f64,
    rows_squared: f64,
    seconds: f64,
    /// Of rows times seconds.
    product: f64,
}

impl Learnt {
    pub(super) fn known(&self) -> bool {
        !self.shares.is_empty()
    }

    pub(super) fn observe(&mut self, samples: &[Sample], cap: u32, sms: f64) {
        if samples.is_empty() || sms <= 0.0 {
            return;
        }
        let found = self.shares.iter().position(|seen| seen.cap == cap);
        let index = found.unwrap_or_else(|| {
            if self.shares.len() == MAX_SHARES {
                self.shares.remove(0);
            }
            self.shares.push(Regression { cap, ..Regression::default() });
            self.shares.len() - 1
        });
        for sample in samples {
            self.shares[index].add(sample, sms);
        }
    }

    /// The line at a share; absurdly slow while nothing is known.
    pub(super) fn line(&self, sms: f64) -> Line {
        let total: f64 = self.shares.iter().map(|seen| seen.count).sum();
        if total <= 0.0 {
            return Line { fixed: 0.0, each: 1e3 };
        }
        let fixed = self.shares.iter().map(|seen| seen.count * seen.line().fixed).sum::<f64>() / total;
        let knee = self.knee();
        let work = |seen: &Regression| seen.line().each * seen.sms().min(knee);
        let work = self.shares.iter().map(|seen| seen.count * work(seen)).sum::<f64>() / total;
        Line { fixed, each: work / sms.clamp(1e-3, knee) }
    }

    /// The SMs past which more do not help, as far as was seen.
    fn knee(&self) -> f64 {
        let per_row = |seen: &Regression| seen.line().each * seen.sms();
        let least = self.shares.iter().map(per_row).fold(f64::INFINITY, f64::min);
        let flat = self.shares.iter().filter(|seen| per_row(seen) > KNEE_SEEN * least);
        // At a share past the knee a row takes `work / knee`.
        flat.map(|seen| least / seen.line().each.max(1e-12)).fold(f64::INFINITY, f64::min).max(1.0)
    }
}

impl Regression {
    fn add(&mut self, sample: &Sample, sms: f64) {
        if self.count > MEMORY {
            for sum in [
                &mut self.count,
                &mut self.rows,
                &mut self.rows_squared,
                &mut self.seconds,
                &mut self.product,
            ] {
                *sum /= 2.0;
            }
        }
        let Sample { rows, count, seconds } = *sample;
        let rows = rows * self.sms() / sms;
        self.count += count;
        self.rows += count * rows;
        self.rows_squared += count * rows * rows;
        self.seconds += count * seconds;
        self.product += count * rows * seconds;
    }

    fn sms(&self) -> f64 {
        f64::from(self.cap.max(1))
    }

    /// The regression's line with all of the cap; where only one size was seen, half of its time is taken to be fixed.
    fn line(&self) -> Line {
        let count = self.count.max(1e-9);
        let (rows, seconds) = (self.rows / count, self.seconds / count);
        let variance = self.rows_squared / count - rows * rows;
        let covariance = self.product / count - rows * seconds;
        let each = if variance > 0.05 * rows { covariance / variance } else { seconds / (1.0 + rows) };
        let rows = rows.max(1.0);
        let each = each.clamp(0.05 * seconds / rows, seconds / rows).max(1e-9);
        Line { fixed: (seconds - each * rows).max(0.0), each }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A model of 2 ms and 100 ms·SM a row, up to 40 SMs.
    fn seconds(rows: f64, sms: f64) -> f64 {
        0.002 + 0.1 * rows / sms.min(40.0)
    }

    fn learnt(caps: &[u32]) -> Learnt {
        let mut learnt = Learnt::default();
        for &cap in caps {
            let sms = f64::from(cap);
            let sample = |rows: f64| Sample { rows, count: 20.0, seconds: seconds(rows, sms) };
            learnt.observe(&[sample(1.0), sample(3.0), sample(8.0)], cap, sms);
        }
        learnt
    }

    fn near(learnt: &Learnt, rows: f64, sms: f64) -> bool {
        (learnt.line(sms).at(rows) / seconds(rows, sms) - 1.0).abs() < 0.02
    }

    #[test]
    fn one_share_teaches_the_shares_below_and_two_the_knee() {
        let one = learnt(&[20]);
        assert!(near(&one, 8.0, 10.0) && near(&one, 1.0, 30.0));
        assert!(!near(&one, 8.0, 132.0), "nothing has shown the knee yet");
        let two = learnt(&[20, 66]);
        assert!([4.0, 20.0, 40.0, 66.0, 132.0].into_iter().all(|sms| near(&two, 8.0, sms)));
    }

    #[test]
    fn what_neighbours_leave_is_told_from_what_is_fixed() {
        let mut learnt = Learnt::default();
        // Full batches where neighbours leave little, small ones where they leave all.
        for (rows, sms) in [(8.0, 10.0), (8.0, 20.0), (2.0, 40.0)] {
            learnt.observe(&[Sample { rows, count: 20.0, seconds: seconds(rows, sms) }], 40, sms);
        }
        assert!([(1.0, 40.0), (8.0, 40.0), (8.0, 10.0)].iter().all(|&(rows, sms)| near(&learnt, rows, sms)));
    }

    #[test]
    fn batches_of_one_size_are_no_line_but_a_guess() {
        let mut learnt = Learnt::default();
        learnt.observe(&[Sample { rows: 1.0, count: 9.0, seconds: 0.010 }], 20, 20.0);
        assert!((learnt.line(20.0).at(1.0) - 0.010).abs() < 1e-9);
        assert!(learnt.line(10.0).at(1.0) > 0.010);
    }

    #[test]
    fn what_is_remembered_is_bounded_and_absurd_samples_are_survived() {
        let mut learnt = learnt(&(2..100).collect::<Vec<_>>());
        assert_eq!(learnt.shares.len(), MAX_SHARES);
        learnt.observe(&[Sample { rows: 1.0, count: 1e18, seconds: 0.0 }], 50, 50.0);
        learnt.observe(&[], 50, 50.0);
        learnt.observe(&[Sample { rows: 1.0, count: 1.0, seconds: 1.0 }], 50, 0.0);
        assert!(learnt.line(0.0).at(1.0).is_finite());
        assert!(Learnt::default().line(10.0).at(1.0).is_finite());
    }
}
