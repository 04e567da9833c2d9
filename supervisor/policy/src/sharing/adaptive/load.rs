//! How many requests a model gets, and when its load has changed.

use std::time::Duration;

use super::window::LONG;

/// A load has changed if it differs by this part,
const ANOTHER: f64 = 0.3;

/// plus so many standard deviations of requests that arrive by chance.
const DEVIATIONS: f64 = 3.0;

/// In requests a second, as a mean over about [`LONG`].
#[derive(Debug, Clone, Default)]
pub(super) struct Load {
    per_s: f64,
    counted: Duration,
    /// The mean when requests had been counted for [`LONG`].
    before: Option<f64>,
}

impl Load {
    /// Returns whether the load has changed.
    pub(super) fn add(&mut self, arrived: u64, span: Duration) -> bool {
        self.counted += span;
        let weight = span.as_secs_f64() / self.counted.min(LONG).as_secs_f64().max(f64::MIN_POSITIVE);
        let came = arrived as f64 / span.as_secs_f64().max(f64::MIN_POSITIVE);
        self.per_s += weight.min(1.0) * (came - self.per_s);
        if self.counted < LONG {
            return false;
        }
        let before = *self.before.get_or_insert(self.per_s);
        // The variance of a Poisson process's mean is its rate over the time; an exponential mean
        // counts for twice its time constant.
        let chance = before.max(self.per_s) / self.counted.min(2 * LONG).as_secs_f64();
        (self.per_s - before).abs() > ANOTHER * before + DEVIATIONS * chance.sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How often the load changes in so many seconds of ten looks each, at so many requests a
    /// second; after each change it is counted anew.
    fn others(load: &mut Load, seconds: u32, per_s: u64) -> usize {
        let is_another = |_: &u32| {
            let is_another = load.add(per_s / 10, Duration::from_millis(100));
            if is_another {
                *load = Load::default();
            }
            is_another
        };
        (0..10 * seconds).filter(is_another).count()
    }

    #[test]
    fn a_step_is_another_load_once_and_a_small_one_is_none() {
        let mut load = Load::default();
        assert_eq!(others(&mut load, 60, 100), 0);
        assert_eq!(others(&mut load, 60, 120), 0);
        assert_eq!(others(&mut load, 60, 800), 1, "not once more as its mean climbs");
        assert_eq!(others(&mut load, 60, 100), 1);
    }

    #[test]
    fn a_few_requests_more_are_chance() {
        let mut load = Load::default();
        assert_eq!(others(&mut load, 60, 10) + others(&mut load, 5, 20), 0);
        let mut load = Load::default();
        load.add(0, Duration::from_millis(100));
        assert_eq!(others(&mut load, 60, 400), 0, "nothing is known before");
    }
}
