//! How many requests will come.
//!
//! The rate is the mean over as many of the last intervals as agree with each other: when the newest few
//! differ from those before them by more than chance explains, the older ones are forgotten (adaptive
//! windowing, after Bifet and Gavalda, 2007). So a steady rate is known ever better, and a new one at once.

use std::collections::VecDeque;
use std::time::Duration;

use shadowslice_shared::units::Moment;

use super::super::Seen;

/// Intervals remembered.
const WINDOW: usize = 64;

/// How many of the newest intervals are held against those before them.
const RECENT: [usize; 4] = [1, 2, 4, 8];

/// Standard deviations that chance explains. Four comparisons an interval, twice a second: one false
/// alarm in some minutes, which costs precision for a while and nothing else.
const CHANCE: f64 = 3.5;

/// Intervals of independent arrivals that speak for a dispersion of 1 before anything was seen.
const CALM: f64 = 8.0;

/// Arrivals that vary more than this against their mean are changes of rate, and no bursts.
const MAX_DISPERSION: f64 = 5.0;

/// A change of the rate within this time is what a decision answers.
const RECENTLY: Duration = Duration::from_secs(3);

/// Half of what a peak was above the rate is forgotten after about two thirds of this time, in seconds.
const PEAK_MEMORY: f64 = 20.0;

/// Arrivals that vary so many times as much as independent ones come in bursts. Of a hundred models whose requests are
/// independent, one seems to at some time within the first 64 intervals.
const BURSTY: f64 = 2.0;

/// Fewer intervals than this say nothing of bursts: the one in which a rate changed is among them.
const TELLING: usize = 6;

/// Half of what they varied more than of late is forgotten after about two thirds of this time, in seconds.
const BURST_MEMORY: f64 = 60.0;

/// What is known of one model's arrivals. Rates are in requests a second.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Demand {
    /// Requests and seconds of the intervals that agree, newest last.
    window: VecDeque<(f64, f64)>,
    rate: f64,
    /// The largest rate, forgotten slowly.
    peak: f64,
    /// Seconds that were observed since the first request.
    observed: f64,
    /// The variance of arrivals in an interval by their mean: 1 if they are independent.
    dispersion: f64,
    /// The largest of those, forgotten slowly.
    bursts: f64,
}

impl Default for Demand {
    fn default() -> Self {
        Self { window: VecDeque::new(), rate: 0.0, peak: 0.0, observed: 0.0, dispersion: 1.0, bursts: 1.0 }
    }
}

impl Demand {
    pub(super) fn observe(&mut self, seen: &Seen) {
        let span = seen.span.as_secs_f64();
        if span <= 0.0 {
            return;
        }
        if self.window.len() == WINDOW {
            self.window.pop_front();
        }
        self.window.push_back((seen.arrived as f64, span));
        self.forget();
        let (came, seconds) = sum(self.window.iter());
        self.rate = came / seconds;
        self.dispersion = self.dispersed();
        self.peak = slowly(self.peak, self.rate, span / PEAK_MEMORY);
        let dispersion = if self.window.len() >= TELLING { self.dispersion } else { 1.0 };
        self.bursts = slowly(self.bursts, dispersion, span / BURST_MEMORY);
        if self.observed > 0.0 || seen.arrived > 0 {
            self.observed += span;
        }
    }

    /// Drops the intervals that the newest ones disagree with.
    fn forget(&mut self) {
        for recent in RECENT {
            let older = self.window.len().saturating_sub(recent);
            if older == 0 {
                return;
            }
            let (came, seconds) = sum(self.window.iter().skip(older));
            let (came_before, seconds_before) = sum(self.window.iter().take(older));
            let rate = (came + came_before) / (seconds + seconds_before);
            let chance = (self.dispersion * rate.max(1.0) * (1.0 / seconds + 1.0 / seconds_before)).sqrt();
            if (came / seconds - came_before / seconds_before).abs() > CHANCE * chance {
                self.window.drain(..older);
                return;
            }
        }
    }

    /// The variance of arrivals in an interval by their mean, 1 or more.
    fn dispersed(&self) -> f64 {
        let excess = |&(came, seconds): &(f64, f64)| {
            let expected = self.rate * seconds;
            (came - expected).powi(2) / expected.max(1.0)
        };
        let intervals = self.window.len() as f64;
        let sum: f64 = self.window.iter().map(excess).sum();
        ((sum + CALM) / (intervals - 1.0 + CALM)).clamp(1.0, MAX_DISPERSION)
    }

    /// What comes now, or came not long ago.
    pub(super) fn peak(&self) -> f64 {
        self.peak
    }

    /// The variance of arrivals in an interval by their mean, 1 or more.
    pub(super) fn dispersion(&self) -> f64 {
        self.dispersion
    }

    /// Whether requests come in bursts, or did not long ago.
    pub(super) fn is_bursty(&self) -> bool {
        self.bursts >= BURSTY
    }

    /// When arrivals changed, if that was just now: the start of the first interval that is of the new kind. Else now.
    pub(super) fn onset(&self, now: Moment) -> Moment {
        let steady = Duration::from_secs_f64(sum(self.window.iter()).1);
        if steady > RECENTLY { now } else { Moment::after_origin(now.since_origin().saturating_sub(steady)) }
    }

    /// For how long arrivals have been observed, in seconds since the first one.
    pub(super) fn observed(&self) -> f64 {
        self.observed
    }

    /// What comes now.
    pub(super) fn rate(&self) -> f64 {
        self.rate
    }
}

fn sum<'a>(intervals: impl Iterator<Item = &'a (f64, f64)>) -> (f64, f64) {
    intervals.fold((0.0, 0.0), |(came, seconds), interval| (came + interval.0, seconds + interval.1))
}

/// What is remembered of a largest value that is now this: all of it at first, and a part `1/e` of the excess after an `age` of 1.
fn slowly(largest: f64, now: f64, age: f64) -> f64 {
    now + (largest - now).max(0.0) * (-age).exp()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(arrivals: &[u64]) -> Demand {
        let mut demand = Demand::default();
        for &arrived in arrivals {
            demand.observe(&Seen { span: Duration::from_millis(500), arrived, ..Seen::default() });
        }
        demand
    }

    #[test]
    fn a_steady_rate_is_known_ever_better() {
        let noisy: Vec<u64> = (0..60).map(|step| 50 + [0, 7, 13, 3, 10][step % 5] - 6).collect();
        let demand = after(&noisy);
        assert!((demand.rate() - 101.2).abs() < 1.0, "{}", demand.rate());
        assert_eq!(demand.window.len(), 60);
        assert_eq!(demand.dispersion, 1.0);
    }

    #[test]
    fn a_new_rate_is_known_at_once() {
        let mut arrivals = vec![50; 40];
        arrivals.push(150);
        assert_eq!(after(&arrivals).rate(), 300.0);
        arrivals.extend([50; 2]);
        let demand = after(&arrivals);
        assert!(demand.rate() < 150.0);
    }

    #[test]
    fn a_change_is_dated_to_the_interval_that_it_came_in() {
        let now = Moment::after_origin(Duration::from_secs(60));
        let mut arrivals = vec![50; 40];
        assert_eq!(after(&arrivals).onset(now), now);
        arrivals.extend([150; 2]);
        assert_eq!(now.since(after(&arrivals).onset(now)), Duration::from_secs(1));
    }

    #[test]
    fn a_slow_drift_is_followed() {
        let rising: Vec<u64> = (0..60).map(|step| 50 + 2 * step).collect();
        assert!(after(&rising).rate() > 300.0);
    }

    #[test]
    fn bursts_show_as_dispersion() {
        let bursty: Vec<u64> = (0..60).map(|step| [44, 60, 35, 66, 45][step % 5]).collect();
        assert!(after(&bursty).dispersion > 2.0);
    }

    #[test]
    fn bursts_are_remembered_for_a_while() {
        let burst = [44, 60, 35, 66, 45, 20, 80].repeat(4);
        let then = |calm: usize| after(&[&burst[..], &vec![50; calm]].concat());
        assert!(then(0).is_bursty() && then(64).is_bursty());
        assert!(then(64).dispersion < BURSTY, "not by what comes now");
        assert!(!then(400).is_bursty());
        assert!(!after(&[50; 20]).is_bursty());
        let begins = |first: u64| after(&[&[first][..], &[190; 10]].concat());
        assert!((0..190).all(|first| !begins(first).is_bursty()), "a load that begins within an interval");
    }

    #[test]
    fn nothing_and_absurdly_much_are_survived() {
        assert_eq!(after(&[0; 10]).rate(), 0.0);
        assert!(after(&[u64::MAX, 0, u64::MAX]).rate().is_finite());
        let mut demand = Demand::default();
        demand.observe(&Seen::default());
        assert_eq!(demand, Demand::default());
    }
}
