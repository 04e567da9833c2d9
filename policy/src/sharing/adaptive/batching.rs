//! How many requests go into a batch, and how long they wait for company.
//!
//! Larger batches make better use of SMs, and take longer. A request may just miss a batch, so it waits for that one
//! and executes with its own: a batch must leave room for the rest of the one before. Beside who is
//! [short](super::shortage) of SMs a batch also waits for as long as it can afford, because what it saves is what others lack.

use std::time::Duration;

use super::super::Terms;
use super::curve::{Curve, Line};
use crate::door::LEAD;

/// A batch's execution may take this part of the SLO: who came too early for it is left out as it is sent.
const LARGEST_PART: f64 = 0.8;

/// What a share carries, and what a request costs, goes by batches that take this part of it: the rest is a request's wait for the one before.
const CARRIED_PART: f64 = 2.0 / 3.0;

/// Where more comes than can be answered in time, a batch that is this much of a row short of another one is reckoned with that.
const NEARLY: f64 = 0.2;

/// No batch waits for company for more than this part of the SLO, nor so long that, if it took this many times its time,
/// it would need more than a part of the SLO: the rest is for what the client counts and is not seen here.
const MAX_DELAY: f64 = 0.5;
const DELAY_MARGIN: f64 = 1.2;
const WITHOUT_WAY: f64 = 0.8;

/// Halvings in a search of a part.
const HALVINGS: u32 = 6;

/// A model's batches when it has so many SMs and so much comes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Batching<'a> {
    pub(super) terms: &'a Terms,
    pub(super) curve: &'a Curve,
    pub(super) sms: f64,
    /// Rows a second.
    pub(super) rate: f64,
    /// Rows of a request.
    pub(super) each: f64,
}

impl Batching<'_> {
    /// Rows of the largest batch.
    pub(super) fn max(&self) -> u32 {
        self.largest_within(LARGEST_PART)
    }

    /// Rows of the largest batch that takes this part of the SLO.
    fn largest_within(&self, part: f64) -> u32 {
        if !self.curve.known() {
            return self.terms.max_batch.max(1);
        }
        let limit = self.slo() * part;
        largest(self.terms.max_batch, |rows| self.curve.time(f64::from(rows), self.sms) <= limit)
    }

    /// The longest that a batch may wait for company, if none is larger than `max`: what came by then must still execute
    /// in time, even if that takes longer than usual.
    pub(super) fn longest_delay(&self, max: u32) -> Duration {
        if !self.curve.known() || max <= 1 {
            return Duration::ZERO;
        }
        let in_time = |delay: f64| {
            let rows = self.rows_after(delay, max);
            delay + DELAY_MARGIN * self.curve.time(rows, self.sms) <= WITHOUT_WAY * self.slo()
        };
        let (mut longest, mut beyond) = (0.0, MAX_DELAY * self.slo());
        for _ in 0..HALVINGS {
            let middle = (longest + beyond) / 2.0;
            if in_time(middle) { longest = middle } else { beyond = middle }
        }
        Duration::from_secs_f64(longest)
    }

    /// Rows that a batch should have when it is sent: what comes while one of as many executes, or while it waits, and no more than come
    /// late enough to be in time with all of them.
    pub(super) fn expected(&self, max: u32, delay: Duration) -> u32 {
        if !self.curve.known() {
            return 1;
        }
        let line = self.line(max);
        let load = self.rate * line.each;
        let meanwhile = if load < 1.0 { self.rate * line.fixed / (1.0 - load) } else { f64::INFINITY };
        let rows = meanwhile.max(self.rows_after(delay.as_secs_f64(), max)).min(f64::from(max));
        let rows = rows.min(self.fresh(line) + NEARLY);
        (rows as u32).max(1)
    }

    /// Rows a second that the largest batches carry, one after the other; none if even one row is too slow.
    pub(super) fn most(&self) -> f64 {
        let rows = f64::from(self.largest_within(CARRIED_PART));
        let time = self.curve.time(rows, self.sms);
        if time <= self.slo() { rows / time } else { 0.0 }
    }

    /// The SM·s that a row takes in the largest batches; nothing if even one row is too slow.
    pub(super) fn cost(&self) -> Option<f64> {
        let rows = f64::from(self.largest_within(CARRIED_PART));
        let time = self.curve.time(rows, self.sms);
        (time <= self.slo()).then_some(self.sms * time / rows)
    }

    /// Rows of the batch for which as many come in what its execution leaves of the SLO.
    fn fresh(&self, line: Line) -> f64 {
        (self.slo() - LEAD.as_secs_f64() - line.fixed) / (line.each + 1.0 / self.rate.max(1e-9))
    }

    fn rows_after(&self, delay: f64, max: u32) -> f64 {
        (self.each + self.rate * delay).min(f64::from(max))
    }

    /// The line that is true for batches of one row and of the largest.
    fn line(&self, max: u32) -> Line {
        self.curve.line(f64::from(max.max(2).min(self.terms.max_batch)), self.sms)
    }

    fn slo(&self) -> f64 {
        self.terms.slo.as_secs_f64()
    }
}

/// The largest batch up to `limit` that fits, where smaller ones fit if larger ones do; at least 1.
fn largest(limit: u32, fits: impl Fn(u32) -> bool) -> u32 {
    let (mut fitting, mut above) = (1, limit.max(1) + 1);
    while above - fitting > 1 {
        let middle = fitting + (above - fitting) / 2;
        if fits(middle) { fitting = middle } else { above = middle }
    }
    fitting
}

#[cfg(test)]
mod tests {
    use super::super::super::fixtures::{profile, terms};
    use super::*;

    /// 2 ms and 70 ms·SM a row, up to 66 SMs; 50 ms.
    fn with<R>(rate: f64, sms: f64, ask: impl Fn(&Batching) -> R) -> R {
        let curve = Curve::new(Some(&profile(2.0, 70.0, 66).execution));
        ask(&Batching { terms: &terms("a", 50), curve: &curve, sms, rate, each: 1.0 })
    }

    #[test]
    fn more_sms_allow_larger_batches() {
        let max = |sms| with(100.0, sms, |b| b.max());
        assert_eq!([1.0, 14.0, 26.0, 66.0, 132.0].map(max), [1, 7, 14, 16, 16]);
    }

    #[test]
    fn batches_wait_for_no_longer_than_their_slo_allows() {
        for (rate, sms) in [(10.0, 26.0), (300.0, 26.0), (300.0, 132.0), (1e6, 14.0)] {
            let (max, delay) = with(rate, sms, |b| (b.max(), b.longest_delay(b.max()).as_secs_f64()));
            let rows = (1.0 + rate * delay).min(f64::from(max));
            let answered = delay + 0.002 + 0.070 * rows / sms.min(66.0);
            assert!(answered <= 0.8 * 0.050, "{rate} {sms}: {delay}, a fifth is for the way");
        }
        assert_eq!(with(10.0, 132.0, |b| b.longest_delay(1)), Duration::ZERO, "nobody can join");
    }

    #[test]
    fn what_comes_meanwhile_is_expected() {
        let expected = |rate| with(rate, 26.0, |b| b.expected(b.max(), Duration::ZERO));
        assert_eq!([0.0, 100.0, 300.0, 1e6].map(expected), [1, 1, 3, 14]);
        // Nine rows take 26 ms, and in the 23 ms that this leaves of the SLO as many come and one more.
        assert_eq!(expected(450.0), 9, "more come, and those before them are too late for more");
        assert_eq!(with(300.0, 26.0, |b| b.expected(b.max(), Duration::from_millis(20))), 7);
    }

    #[test]
    fn few_sms_are_cheaper_and_too_few_are_too_slow() {
        let cost = |sms| with(1.0, sms, |b| b.cost());
        assert!(cost(26.0) < cost(132.0));
        assert_eq!(cost(1.0), None);
    }

    #[test]
    fn nothing_is_known_without_a_profile_at_first() {
        let curve = Curve::new(None);
        let terms = terms("a", 50);
        let blind = Batching { terms: &terms, curve: &curve, sms: 20.0, rate: 100.0, each: 1.0 };
        assert_eq!((blind.max(), blind.longest_delay(16)), (16, Duration::ZERO));
        assert_eq!(blind.expected(16, Duration::ZERO), 1);
    }

    #[test]
    fn a_search_that_nothing_fits_ends_at_one() {
        assert_eq!(largest(16, |_| false), 1);
        assert_eq!(largest(16, |_| true), 16);
        assert_eq!(largest(0, |_| true), 1);
    }
}
