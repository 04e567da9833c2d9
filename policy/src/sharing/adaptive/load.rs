//! How many requests come for a model, and when that has become another load.

use std::time::Duration;

use super::window::LONG;

/// A load that differs by this part is another one,
const ANOTHER: f64 = 0.3;

/// if it differs by so many standard deviations of requests that come by chance, too.
const DEVIATIONS: f64 = 3.0;

/// Requests that come in a second, as a mean over about [`LONG`].
#[derive(Debug, Clone, Default)]
pub(super) struct Load {
    per_s: f64,
    /// For how long they were counted.
    counted: Duration,
    /// What they were when they had been counted for long enough.
    before: Option<f64>,
}

impl Load {
    /// Adds the requests that came in a span. Whether the load is another one now.
    pub(super) fn add(&mut self, arrived: u64, span: Duration) -> bool {
        self.counted += span;
        let weight = span.as_secs_f64() / self.counted.min(LONG).as_secs_f64().max(f64::MIN_POSITIVE);
        let came = arrived as f64 / span.as_secs_f64().max(f64::MIN_POSITIVE);
        self.per_s += weight.min(1.0) * (came - self.per_s);
        if self.counted < LONG {
            return false;
        }
        let before = *self.before.get_or_insert(self.per_s);
        // The variance of a Poisson process's mean is its rate over the time; an exponential mean counts for twice its time constant.
        let chance = before.max(self.per_s) / self.counted.min(2 * LONG).as_secs_f64();
        (self.per_s - before).abs() > ANOTHER * before + DEVIATIONS * chance.sqrt()
    }
}
