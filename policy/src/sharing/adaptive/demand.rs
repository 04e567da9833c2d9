//! How many requests will come.
//!
//! The rate is the mean over as many of the last intervals as agree with each other: when the newest few
//! differ from those before them by more than chance explains, the older ones are forgotten (adaptive
//! windowing, after Bifet and Gavalda, 2007). So a steady rate is known ever better, and a new one at once.

use std::collections::VecDeque;
use std::time::Duration;

use shadowslice_shared::units::Moment;

use super::super::Seen;
use crate::bursts::Slots;

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

/// Fewer intervals than this say nothing of bursts, nor do their slots: the one in which a rate changed is among them.
const TELLING: usize = 6;

/// Half of what they varied more than of late is forgotten after about two thirds of this time, in seconds.
const BURST_MEMORY: f64 = 60.0;

/// Half of how large requests were is forgotten after about two thirds of this time, in seconds.
const ROWS_MEMORY: f64 = 5.0;

/// Standard deviations by which what was seen may be off by chance.
const UNSURE: f64 = 2.0;

/// A rate is another if it differs for certain by this factor.
const CHANGED: f64 = 1.3;

/// What came in less time than this, in seconds, is no rate: who waited for the same batch asks again at the same moment.
const TELLING_S: f64 = 0.05;

/// This part of a peak may come again without being news.
const OF_PEAK: f64 = 0.8;

/// What came in an interval.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Interval {
    came: f64,
    seconds: f64,
    slots: Slots,
}

impl Interval {
    /// The dispersion from slot to slot.
    fn dispersion(&self) -> f64 {
        self.slots.variance() / self.slots.arrived().max(1.0)
    }
}

/// What is known of one model's arrivals. Rates are in requests a second. A dispersion is the variance of arrivals by their mean: 1 where
/// they are independent, less where they come more evenly, more in bursts (Cox and Lewis, 1966).
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Demand {
    /// The intervals that agree, newest last.
    window: VecDeque<Interval>,
    rate: f64,
    /// The largest rate, forgotten slowly.
    peak: f64,
    /// Seconds that were observed since the first request.
    observed: f64,
    /// The dispersion by which chance is judged: nobody is believed the sooner for coming evenly, so it is 1 or more.
    safe_dispersion: f64,
    /// The largest of those, forgotten slowly.
    peak_dispersion: f64,
    sizes: Sizes,
}

/// Requests of late and their rows.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct Sizes {
    requests: f64,
    rows: f64,
}

impl Default for Demand {
    fn default() -> Self {
        Self {
            window: VecDeque::new(),
            rate: 0.0,
            peak: 0.0,
            observed: 0.0,
            safe_dispersion: 1.0,
            peak_dispersion: 1.0,
            sizes: Sizes::default(),
        }
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
        self.window.push_back(Interval { came: seen.arrived as f64, seconds: span, slots: seen.slots });
        self.forget();
        self.sizes.observe(seen);
        let (came, seconds) = sum(self.window.iter());
        self.rate = came / seconds;
        self.safe_dispersion = self.dispersion().max(1.0);
        self.peak = slowly(self.peak, self.rate, span / PEAK_MEMORY);
        let dispersion = if self.is_steady() { self.safe_dispersion } else { 1.0 };
        self.peak_dispersion = slowly(self.peak_dispersion, dispersion, span / BURST_MEMORY);
        if self.observed > 0.0 || seen.arrived > 0 {
            self.observed += span;
        }
    }

    /// What it would be if as much came on as since the last interval, where that differs for certain. Bursts of late are no news.
    pub(super) fn foreseen(&self, seen: &Seen) -> Self {
        let (came, seconds) = (seen.arrived as f64, seen.span.as_secs_f64());
        let before = sum(self.window.iter());
        let chance = self.safe_dispersion.max(self.peak_dispersion) * CHANCE.powi(2);
        let changed = seconds >= TELLING_S && difference((came, seconds), before) > chance;
        Self { rate: if changed { came / seconds } else { self.rate }, ..self.clone() }
    }

    /// Drops the intervals that the newest ones disagree with.
    fn forget(&mut self) {
        for recent in RECENT {
            let older = self.window.len().saturating_sub(recent);
            if older == 0 {
                return;
            }
            let (newest, before) = (sum(self.window.iter().skip(older)), sum(self.window.iter().take(older)));
            if difference(newest, before) > self.safe_dispersion * CHANCE.powi(2) {
                self.window.drain(..older);
                return;
            }
        }
    }

    /// The dispersion from interval to interval.
    fn between_intervals(&self) -> f64 {
        let excess = |interval: &Interval| {
            let expected = self.rate * interval.seconds;
            (interval.came - expected).powi(2) / expected.max(1.0)
        };
        let intervals = self.window.len() as f64;
        let sum: f64 = self.window.iter().map(excess).sum();
        (sum + CALM) / (intervals - 1.0 + CALM)
    }

    /// The dispersion from slot to slot within intervals, which shows bursts within seconds. The interval in which it is largest is left out.
    fn within_intervals(&self) -> f64 {
        if self.window.len() < TELLING {
            return 1.0;
        }
        let dispersion = |(at, interval): (usize, &Interval)| (at, interval.dispersion());
        let most =
            self.window.iter().enumerate().map(dispersion).max_by(|one, other| one.1.total_cmp(&other.1));
        let others = self.window.iter().enumerate().filter(|(at, _)| most.is_none_or(|most| most.0 != *at));
        let (variance, arrived) = others.fold((0.0, 0.0), |(variance, arrived), (_, interval)| {
            (variance + interval.slots.variance(), arrived + interval.slots.arrived())
        });
        variance / arrived.max(1.0)
    }

    /// What comes now, or came not long ago.
    pub(super) fn peak(&self) -> f64 {
        self.peak
    }

    /// The most that comes where nothing has changed: what comes now, give or take chance, or nearly what came not long ago.
    pub(super) fn expected(&self) -> f64 {
        self.at_most().max(OF_PEAK * self.peak)
    }

    /// The least that comes now, give or take chance.
    pub(super) fn at_least(&self) -> f64 {
        (self.rate - self.chance()).max(0.0)
    }

    /// The most that comes now, give or take chance.
    pub(super) fn at_most(&self) -> f64 {
        self.rate + self.chance()
    }

    /// Whether certainly more or less comes than this.
    pub(super) fn is_another_than(&self, rate: f64) -> bool {
        self.at_least() > CHANGED * rate || self.at_most() < rate / CHANGED
    }

    /// Whether more came not long ago, so that what comes now may soon be all that counts.
    pub(super) fn is_fading(&self) -> bool {
        self.peak > CHANGED * self.at_most()
    }

    /// What the rate may be off by chance.
    fn chance(&self) -> f64 {
        let seconds = sum(self.window.iter()).1;
        UNSURE * (self.rate * self.safe_dispersion / seconds.max(f64::MIN_POSITIVE)).sqrt()
    }

    /// The dispersion as it is.
    pub(super) fn dispersion(&self) -> f64 {
        self.between_intervals().max(self.within_intervals()).min(MAX_DISPERSION)
    }

    /// The dispersion, 1 or more.
    pub(super) fn safe_dispersion(&self) -> f64 {
        self.safe_dispersion
    }

    /// Whether requests come in bursts, or did not long ago.
    pub(super) fn is_bursty(&self) -> bool {
        self.peak_dispersion >= BURSTY
    }

    /// Whether the rate has stayed for long enough to say whether requests come in bursts.
    pub(super) fn is_steady(&self) -> bool {
        self.window.len() >= TELLING
    }

    /// When arrivals changed, if that was just now: the start of the first interval that is of the new kind. Else now.
    pub(super) fn onset(&self, now: Moment) -> Moment {
        let steady = Duration::from_secs_f64(sum(self.window.iter()).1);
        if steady > RECENTLY { now } else { now - steady }
    }

    /// For how long arrivals have been observed, in seconds since the first one.
    pub(super) fn observed(&self) -> f64 {
        self.observed
    }

    /// What comes now.
    pub(super) fn rate(&self) -> f64 {
        self.rate
    }

    /// The same in rows a second.
    pub(super) fn row_rate(&self) -> f64 {
        self.rows(self.rate)
    }

    /// The rows of so many requests, which are as large as those of late.
    pub(super) fn rows(&self, requests: f64) -> f64 {
        let Sizes { requests: came, rows } = self.sizes;
        requests * if came > 0.0 { (rows / came).max(1.0) } else { 1.0 }
    }
}

impl Sizes {
    fn observe(&mut self, seen: &Seen) {
        if seen.arrived == 0 {
            return;
        }
        let left = (-seen.span.as_secs_f64() / ROWS_MEMORY).exp();
        self.requests = self.requests * left + seen.arrived as f64;
        self.rows = self.rows * left + seen.rows as f64;
    }
}

/// Requests and seconds.
fn sum<'a>(intervals: impl Iterator<Item = &'a Interval>) -> (f64, f64) {
    intervals.fold((0.0, 0.0), |(came, seconds), interval| (came + interval.came, seconds + interval.seconds))
}

/// What is remembered of a largest value that is now this: all of it at first, and a part `1/e` of the excess after an `age` of 1.
fn slowly(largest: f64, now: f64, age: f64) -> f64 {
    now + (largest - now).max(0.0) * (-age).exp()
}

/// How much likelier requests and seconds are, and those before them, at two rates than at one: a [`deviance`].
fn difference((came, seconds): (f64, f64), (came_before, seconds_before): (f64, f64)) -> f64 {
    let rate = (came + came_before) / (seconds + seconds_before);
    deviance(came, rate * seconds) + deviance(came_before, rate * seconds_before)
}

/// Twice the logarithm of how much likelier so many requests were at the rate at which they came than at one at which so many are
/// expected: the deviance of Poisson's distribution. Of many requests it is the square of the standard deviations between the two; of few it
/// allows for their number being lopsided.
fn deviance(came: f64, expected: f64) -> f64 {
    let surplus = if came > 0.0 { came * (came / expected).ln() } else { 0.0 };
    2.0 * (surplus - (came - expected))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bursts::SlotCounter;

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
        assert_eq!(demand.safe_dispersion, 1.0);
    }

    #[test]
    fn how_large_requests_are_is_known_soon() {
        let mut demand = Demand::default();
        let mut see = |arrived: u64, rows: u64| {
            demand.observe(&Seen { span: Duration::from_millis(500), arrived, rows, ..Seen::default() });
            demand.rows(2.0)
        };
        assert_eq!([see(0, 0), see(10, 10), see(0, 0)], [2.0; 3]);
        let after: Vec<f64> = (0..20).map(|_| see(10, 160)).collect();
        assert!(after.is_sorted() && after[0] < 20.0 && after[19] > 27.0, "{after:?}");
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
    fn few_requests_that_are_twice_as_many_once_are_no_new_rate() {
        let seldom = |then: u64| after(&[&[8, 9, 7, 10, 8, 9].repeat(5)[..], &[then]].concat());
        assert_eq!(
            seldom(19).window.len(),
            31,
            "19 of 8.5 is 3.6 standard deviations, and one in a thousand"
        );
        assert_eq!(seldom(22).window.len(), 1);
        assert_eq!(seldom(0).window.len(), 1);
        assert_eq!(after(&[&[0; 30][..], &[1]].concat()).window.len(), 31);
    }

    #[test]
    fn what_comes_at_least_is_less_where_little_is_known() {
        let (one, many) = (after(&[50]), after(&[50; 60]));
        assert!((one.at_least() - (100.0 - 2.0 * 200_f64.sqrt())).abs() < 1e-9, "{}", one.at_least());
        assert!(many.at_least() > 95.0 && many.at_least() < many.rate());
        assert_eq!(after(&[1]).at_least(), 0.0);
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
        assert!(after(&bursty).safe_dispersion > 2.0);
    }

    #[test]
    fn bursts_are_remembered_for_a_while() {
        let burst = [44, 60, 35, 66, 45, 20, 80].repeat(4);
        let then = |calm: usize| after(&[&burst[..], &vec![50; calm]].concat());
        assert!(then(0).is_bursty() && then(64).is_bursty());
        assert!(then(64).safe_dispersion < BURSTY, "not by what comes now");
        assert!(!then(400).is_bursty());
        assert!(!after(&[50; 20]).is_bursty());
        let begins = |first: u64| after(&[&[first][..], &[190; 10]].concat());
        assert!((0..190).all(|first| !begins(first).is_bursty()), "a load that begins within an interval");
    }

    /// After intervals in which requests came at these ms, in slots that were counted from one to the next.
    fn slotted<'a>(intervals: impl IntoIterator<Item = &'a [u64]>) -> Demand {
        let (mut demand, mut counter) = (Demand::default(), SlotCounter::default());
        for (n, arrivals) in intervals.into_iter().enumerate() {
            let at = |ms: u64| Moment::after_origin(Duration::from_millis(500 * n as u64 + ms));
            arrivals.iter().for_each(|&ms| counter.note(at(ms)));
            let (slots, arrived) = (counter.take(at(500)), arrivals.len() as u64);
            demand.observe(&Seen { span: Duration::from_millis(500), arrived, slots, ..Seen::default() });
        }
        demand
    }

    #[test]
    fn bursts_within_intervals_show_within_seconds() {
        let bursts: Vec<u64> = [0, 100, 300].iter().flat_map(|&burst| burst..burst + 20).collect();
        assert!(!slotted([&bursts[..]; 5]).is_bursty());
        assert!(slotted([&bursts[..]; 6]).is_bursty(), "though as many come in each interval");
        let even: Vec<u64> = (0..100).map(|n| 5 * n).collect();
        assert_eq!(slotted([&even[..]; 6]).safe_dispersion(), 1.0);
        assert_eq!(slotted([&even[..]; 5]).dispersion(), 1.0, "too soon to say that they are even");
        assert!(slotted([&even[..]; 40]).dispersion() < 0.2);
        let once: Vec<u64> = (0..100).collect();
        let changes = [&even[..], &even, &once, &even, &even, &even];
        assert_eq!(slotted(changes).within_intervals(), 0.0, "one interval is no burst");
    }

    #[test]
    fn what_comes_between_two_intervals_counts_where_it_differs_for_certain() {
        let foreseen = |demand: &Demand, arrived: u64, ms: u64| {
            let seen = Seen { span: Duration::from_millis(ms), arrived, ..Seen::default() };
            let foreseen = demand.foreseen(&seen);
            assert_eq!(Demand { rate: demand.rate, ..foreseen.clone() }, *demand, "all else is as it was");
            foreseen.rate()
        };
        let steady = after(&[50; 20]);
        assert_eq!(
            [2, 10, 20, 40].map(|arrived| foreseen(&steady, arrived, 100)),
            [100.0, 100.0, 100.0, 400.0]
        );
        assert_eq!(
            [50, 100].map(|ms| foreseen(&steady, 0, ms)),
            [100.0, 0.0],
            "as soon as that is no chance"
        );
        assert_eq!([0, 1, 49, 50].map(|ms| foreseen(&steady, 40, ms)), [100.0, 100.0, 100.0, 800.0]);
        assert_eq!(foreseen(&after(&[0; 10]), 20, 100), 200.0);
        assert_eq!(foreseen(&Demand::default(), 40, 100), 0.0, "nothing was seen that it could differ from");
        let bursty = after(&[20, 2, 30, 5, 18, 3].repeat(8));
        assert_eq!(foreseen(&after(&[13; 48]), 14, 100), 140.0);
        assert_eq!(foreseen(&bursty, 14, 100), bursty.rate(), "a burst like others");
        let calm = after(&[&[20, 2, 30, 5, 18, 3].repeat(8)[..], &[13; 64]].concat());
        assert_eq!(foreseen(&calm, 13, 100), calm.rate(), "or like those of not long ago");
    }

    #[test]
    fn what_is_expected_allows_for_chance_and_for_what_came_not_long_ago() {
        let steady = after(&[100; 20]);
        assert!((200.0..210.0).contains(&steady.expected()), "{}", steady.expected());
        assert!(after(&[100]).expected() > steady.expected() + 10.0, "less is known");
        let fell = after(&[&[100; 20][..], &[20; 4]].concat());
        assert_eq!(fell.rate(), 40.0);
        assert!((120.0..160.0).contains(&fell.expected()), "{}", fell.expected());
        assert!(after(&[0; 10]).expected().is_finite() && Demand::default().expected() == 0.0);
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
