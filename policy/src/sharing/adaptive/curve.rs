//! How long a model's batches take at a share, without what its neighbours cost.

use shadowslice_shared::profile::Execution;

use super::learnt::Learnt;

/// Batches that speak for the scalar at most, so that an interval with as many weighs as much as all before it. A profile counts as a quarter
/// of them.
const CONFIDENT: f64 = 200.0;

/// Bounds of the scalar: a profile that is further off describes another model.
const SCALE: std::ops::RangeInclusive<f64> = 0.1..=10.0;

/// A profile is believed where the logarithm of the scalar is less than this: what neighbours leave is known no better, so that a profile that is
/// right seems wrong by some percent. One that is off by twice as much is corrected in full.
const BELIEVED: f64 = 0.05;

/// The execution time at one share as a line over the batch: `fixed + each * rows`, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Line {
    pub(super) fixed: f64,
    pub(super) each: f64,
}

impl Line {
    /// The line through the times of one row and of `rows` rows. Never falls.
    pub(super) fn through(one: f64, rows: f64, many: f64) -> Self {
        let each = if rows > 1.0 { ((many - one) / (rows - 1.0)).clamp(0.0, one) } else { one };
        Self { fixed: one - each, each }
    }

    /// The time of so many rows.
    pub(super) fn at(self, rows: f64) -> f64 {
        self.fixed + self.each * rows
    }
}

/// Batches of one size, seen at a share that its neighbours left the model.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sample {
    /// Rows.
    pub(super) rows: f64,
    /// How many batches.
    pub(super) count: f64,
    /// Their mean time in seconds.
    pub(super) seconds: f64,
}

/// A model's execution times.
#[derive(Debug, Clone)]
pub(super) enum Curve {
    /// As its profile says, times one scalar that is corrected by what is seen.
    Profiled {
        /// The profile's times.
        execution: Execution,
        /// What they would have to be multiplied by to be what was seen,
        observed: f64,
        /// and what they are multiplied by.
        scale: f64,
        /// Batches that speak for the scalar, up to a limit.
        seen: f64,
    },
    /// As far as it was learnt.
    Learnt(Learnt),
}

impl Curve {
    pub(super) fn new(execution: Option<&Execution>) -> Self {
        match execution {
            Some(execution) => {
                let execution = execution.clone();
                Self::Profiled { execution, observed: 1.0, scale: 1.0, seen: CONFIDENT / 4.0 }
            }
            None => Self::Learnt(Learnt::default()),
        }
    }

    /// How many times as long as its profile says batches are taken to take; 1 without a profile.
    pub(super) fn scale(&self) -> f64 {
        match *self {
            Self::Profiled { scale, .. } => scale,
            Self::Learnt(_) => 1.0,
        }
    }

    /// Whether it can say anything.
    pub(super) fn known(&self) -> bool {
        match self {
            Self::Profiled { .. } => true,
            Self::Learnt(learnt) => learnt.known(),
        }
    }

    /// The time of a batch in seconds.
    pub(super) fn time(&self, rows: f64, sms: f64) -> f64 {
        match self {
            Self::Profiled { execution, scale, .. } => {
                scale * execution.time(rows.max(1.0).round() as u32, sms).as_secs_f64()
            }
            Self::Learnt(learnt) => learnt.line(sms).at(rows),
        }
    }

    /// The line that is true for one row and for `rows`.
    pub(super) fn line(&self, rows: f64, sms: f64) -> Line {
        match self {
            Self::Profiled { .. } if rows > 1.0 => {
                Line::through(self.time(1.0, sms), rows, self.time(rows, sms))
            }
            Self::Profiled { .. } => Line::through(self.time(1.0, sms), 1.0, 0.0),
            Self::Learnt(learnt) => learnt.line(sms),
        }
    }

    /// Learns from what was seen while the model had about `sms` SMs; `share` is its cap.
    pub(super) fn observe(&mut self, samples: &[Sample], share: u32, sms: f64) {
        match self {
            Self::Learnt(learnt) => learnt.observe(samples, share, sms),
            Self::Profiled { execution, observed, scale, seen } => {
                let (mut logs, mut count) = (0.0, 0.0);
                for sample in samples {
                    let rows = sample.rows.max(1.0).round() as u32;
                    let ratio = sample.seconds / execution.time(rows, sms).as_secs_f64().max(1e-9);
                    logs += sample.count * ratio.max(1e-6).ln();
                    count += sample.count;
                }
                if count > 0.0 {
                    let weight = count / (count + *seen);
                    let log = (1.0 - weight) * observed.ln() + weight * logs / count;
                    *observed = log.exp().clamp(*SCALE.start(), *SCALE.end());
                    *scale = corrected(*observed);
                    *seen = (*seen + count).min(CONFIDENT);
                }
            }
        }
    }
}

/// What a profile is multiplied by that seems to be off by this factor.
fn corrected(observed: f64) -> f64 {
    let off = observed.ln();
    (off * (off.abs() / BELIEVED - 1.0).clamp(0.0, 1.0)).exp()
}

#[cfg(test)]
mod tests {
    use super::super::super::fixtures::profile;
    use super::*;

    fn profiled() -> Curve {
        Curve::new(Some(&profile(2.0, 100.0, 40).execution))
    }

    #[test]
    fn a_profile_speaks_until_it_is_corrected() {
        let mut curve = profiled();
        assert!((curve.time(4.0, 40.0) - 0.012).abs() < 1e-6);
        for _ in 0..20 {
            curve.observe(&[Sample { rows: 4.0, count: 100.0, seconds: 0.018 }], 40, 40.0);
        }
        assert!((curve.time(4.0, 40.0) - 0.018).abs() < 1e-4);
        assert!((curve.time(1.0, 20.0) - 1.5 * 0.007).abs() < 1e-3, "one scalar for all");
    }

    #[test]
    fn a_profile_that_seems_wrong_by_little_is_believed() {
        let seen = |factor: f64| {
            let mut curve = profiled();
            for _ in 0..20 {
                curve.observe(&[Sample { rows: 4.0, count: 100.0, seconds: 0.012 * factor }], 40, 40.0);
            }
            curve.scale()
        };
        assert_eq!([0.96, 1.0, 1.04].map(seen), [1.0; 3]);
        assert!(seen(1.08) > 1.03 && seen(1.08) < 1.06, "in part");
        assert!((seen(1.2) - 1.2).abs() < 1e-3 && (seen(0.8) - 0.8).abs() < 1e-3);
    }

    #[test]
    fn a_single_slow_batch_hardly_moves_it() {
        let mut curve = profiled();
        curve.observe(&[Sample { rows: 1.0, count: 500.0, seconds: 0.0045 }], 40, 40.0);
        curve.observe(&[Sample { rows: 1.0, count: 1.0, seconds: 1.0 }], 40, 40.0);
        assert!(curve.time(1.0, 40.0) < 0.005);
    }

    #[test]
    fn lines_are_true_at_both_ends_and_never_fall() {
        let line = profiled().line(8.0, 40.0);
        assert!((line.at(1.0) - 0.0045).abs() < 1e-6 && (line.at(8.0) - 0.022).abs() < 1e-6);
        assert_eq!(Line::through(5.0, 4.0, 3.0), Line { fixed: 5.0, each: 0.0 });
        assert_eq!(Line::through(5.0, 1.0, 0.0), Line { fixed: 0.0, each: 5.0 });
    }
}
