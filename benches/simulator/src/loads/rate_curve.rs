//! The rate of a load over time, as a sequence of steps. Each step multiplies the mean rate by a
//! factor.

use std::f64::consts::TAU;

use crate::random::Random;

/// The number of steps in a run that approximate a wave.
const WAVE_STEPS: u32 = 192;

/// The number of periods of a wave in a run.
const WAVE_PERIODS: f64 = 2.0;

/// The amplitude of a wave, as a fraction of the mean rate.
const WAVE_SWING: f64 = 0.8;

/// The low state of a switching rate: the factor of the rate, and the mean duration of the state in
/// seconds. The mean factor over both states is 1.
const LOW: (f64, f64) = (0.6, 6.0);
/// The high state of a switching rate: the factor of the rate, and the mean duration of the state
/// in seconds.
const HIGH: (f64, f64) = (2.2, 2.0);

/// A step with a constant rate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct RateSpan {
    /// The end of the step, in seconds since the start.
    pub(crate) until: f64,
    /// The rate as a multiple of the mean rate.
    pub(crate) factor: f64,
}

/// The rate over a run, as an iterator over its steps. The mean factor over the run is 1.
#[derive(Debug, Clone)]
pub(crate) enum RateCurve {
    Steps(std::vec::IntoIter<RateSpan>),
    Wave { phase: f64, seconds: f64, passed: u32 },
    Switching { random: Random, high: bool, until: f64 },
}

impl RateCurve {
    /// Returns a curve with these steps. Each step consists of its end, as a fraction of the run,
    /// and its factor. Scales the factors so that their mean is 1.
    pub(crate) fn steps(steps: &[(f64, f64)], seconds: f64) -> Self {
        let starts = [0.0].into_iter().chain(steps.iter().map(|step| step.0));
        let mean: f64 = starts.zip(steps).map(|(start, (end, factor))| (end - start) * factor).sum();
        let scaled =
            steps.iter().map(|(end, factor)| RateSpan { until: end * seconds, factor: factor / mean });
        Self::Steps(scaled.collect::<Vec<_>>().into_iter())
    }

    /// Returns a sine wave. `phase` is a fraction of its period.
    pub(crate) fn wave(phase: f64, seconds: f64) -> Self {
        Self::Wave { phase, seconds, passed: 0 }
    }

    /// Returns a curve that switches between the low and the high state at random times.
    pub(crate) fn switching(mut random: Random) -> Self {
        let high = random.fraction() < HIGH.1 / (HIGH.1 + LOW.1);
        Self::Switching { random, high: !high, until: 0.0 }
    }
}

impl Iterator for RateCurve {
    type Item = RateSpan;

    fn next(&mut self) -> Option<RateSpan> {
        match self {
            Self::Steps(steps) => steps.next(),
            Self::Wave { phase, seconds, passed } => {
                let middle = (f64::from(*passed) + 0.5) / f64::from(WAVE_STEPS);
                *passed += 1;
                let until = *seconds * f64::from(*passed) / f64::from(WAVE_STEPS);
                let factor = 1.0 + WAVE_SWING * (TAU * (WAVE_PERIODS * middle + *phase)).sin();
                Some(RateSpan { until, factor })
            }
            Self::Switching { random, high, until } => {
                *high = !*high;
                let (factor, mean) = if *high { HIGH } else { LOW };
                *until += mean * random.exponential();
                Some(RateSpan { until: *until, factor })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::RandomPurpose;

    /// Returns the mean factor over the first `seconds` of the curve.
    fn mean(curve: RateCurve, seconds: f64) -> f64 {
        let (mut at, mut sum) = (0.0, 0.0);
        for step in curve {
            let until = step.until.min(seconds);
            sum += (until - at) * step.factor;
            at = until;
            if at >= seconds {
                break;
            }
        }
        sum / seconds
    }

    #[test]
    fn the_mean_of_a_curve_is_one() {
        let steps = RateCurve::steps(&[(0.4, 1.0), (0.5, 5.0), (1.0, 1.0)], 120.0);
        assert!((mean(steps, 120.0) - 1.0).abs() < 1e-9);
        assert!((mean(RateCurve::wave(0.3, 60.0), 60.0) - 1.0).abs() < 1e-9);
        let switching = RateCurve::switching(Random::new(5, RandomPurpose::RateCurve, 0));
        assert!((mean(switching, 1e6) - 1.0).abs() < 0.02);
    }
}
