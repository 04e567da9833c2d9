//! How many requests will come.

use std::time::Duration;

use super::super::Seen;

/// What a new interval of [`REFERENCE`] weighs against the smoothed level, and against the smoothed trend.
const LEVEL_WEIGHT: f64 = 0.5;
const TREND_WEIGHT: f64 = 0.2;
const REFERENCE: Duration = Duration::from_millis(500);

/// How far ahead: what a hand-over takes, about.
const AHEAD: f64 = 1.5;

/// A peak counts less and less, by a factor of e in this many seconds: who came so often once will
/// again, and a cap that waits for it costs nothing while nothing executes under it.
const PEAK_SECONDS: f64 = 30.0;

/// What the newest interval weighs in the variance of arrivals.
const VARIANCE_WEIGHT: f64 = 0.1;

/// Arrivals that vary more than this against their mean are a change of rate, and no burst.
const MAX_DISPERSION: f64 = 4.0;

/// What is known of one model's arrivals. Rates are in requests a second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Demand {
    /// Seconds observed.
    observed: f64,
    level: f64,
    /// Change of the level in a second.
    trend: f64,
    peak: f64,
    /// Variance of the arrivals in an interval by their mean: 1 for Poisson's.
    dispersion: f64,
    /// The highest rate seen in one interval, forgotten like a peak.
    highest: f64,
}

impl Default for Demand {
    fn default() -> Self {
        Self { observed: 0.0, level: 0.0, trend: 0.0, peak: 0.0, dispersion: 1.0, highest: 0.0 }
    }
}

impl Demand {
    pub(super) fn observe(&mut self, seen: &Seen) {
        let span = seen.span.as_secs_f64();
        if span <= 0.0 {
            return;
        }
        let came = seen.arrived as f64;
        let rate = came / span;
        if self.observed == 0.0 {
            self.level = rate;
        } else {
            let expected = self.level * span;
            let excess = (came - expected).powi(2) / expected.max(1.0);
            self.dispersion += VARIANCE_WEIGHT * (excess.min(4.0 * MAX_DISPERSION) - self.dispersion);
            let weight = |weight: f64| 1.0 - (1.0 - weight).powf(span / REFERENCE.as_secs_f64());
            let before = self.level;
            self.level += weight(LEVEL_WEIGHT) * (rate - self.level);
            self.trend += weight(TREND_WEIGHT) * ((self.level - before) / span - self.trend);
        }
        self.observed += span;
        let forget = (-span / PEAK_SECONDS).exp();
        self.highest = (self.highest * forget).max(rate);
        self.peak = (self.peak * forget).max(self.level);
    }

    /// Seconds observed.
    pub(super) fn observed(&self) -> f64 {
        self.observed
    }

    /// What comes now.
    pub(super) fn level(&self) -> f64 {
        self.level
    }

    /// What will come by when a hand-over is through; never more than was seen.
    pub(super) fn forecast(&self) -> f64 {
        (self.level + self.trend.max(0.0) * AHEAD).min(self.highest).max(self.level)
    }

    /// What may come again.
    pub(super) fn peak(&self) -> f64 {
        self.peak.max(self.forecast())
    }

    /// Variance by mean, 1 to 4.
    pub(super) fn dispersion(&self) -> f64 {
        self.dispersion.clamp(1.0, MAX_DISPERSION)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(arrivals: &[u64]) -> Demand {
        let mut demand = Demand::default();
        for &arrived in arrivals {
            demand.observe(&Seen { span: REFERENCE, arrived, ..Seen::default() });
        }
        demand
    }

    #[test]
    fn a_steady_rate_is_what_will_come() {
        let demand = after(&[50; 40]);
        assert!((demand.level() - 100.0).abs() < 1e-9 && (demand.peak() - 100.0).abs() < 1e-9);
        assert_eq!(demand.dispersion(), 1.0);
    }

    #[test]
    fn a_rise_is_seen_coming_but_not_beyond_what_was_seen() {
        let rising: Vec<u64> = (10..30).map(|step| 5 * step).collect();
        let demand = after(&rising);
        assert!(demand.forecast() > demand.level());
        assert!(demand.forecast() <= 2.0 * 145.0);
    }

    #[test]
    fn a_peak_is_remembered_for_a_while() {
        let mut arrivals = vec![150; 20];
        arrivals.extend([50; 20]);
        let demand = after(&arrivals);
        assert!((demand.level() - 100.0).abs() < 1.0);
        assert!(demand.peak() > 200.0);
        arrivals.extend([50; 400]);
        assert!(after(&arrivals).peak() < 101.0);
    }

    #[test]
    fn bursts_show_as_dispersion() {
        let bursty: Vec<u64> = (0..100).map(|step| if step % 2 == 0 { 20 } else { 80 }).collect();
        assert!(after(&bursty).dispersion() > 3.0);
    }

    #[test]
    fn nothing_and_absurdly_much_are_survived() {
        assert_eq!(after(&[0; 10]).peak(), 0.0);
        assert!(after(&[u64::MAX, 0, u64::MAX]).peak().is_finite());
        let mut demand = Demand::default();
        demand.observe(&Seen::default());
        assert_eq!(demand, Demand::default());
    }
}
