//! Whether company comes to batches that wait for it.
//!
//! Requests that come at random join a batch at any time of its wait. Clients that wait for their answers all come at once, right
//! after the batch before, and nobody after them: then a wait only costs time, and with it their requests.

use std::time::Duration;

use super::super::Seen;
use super::lasting::Lasting;
use crate::batcher::Waits;

/// What was seen of waits weighs this part of it an interval later.
const MEMORY: f64 = 0.7;

/// Nothing is said of fewer batches.
const BATCHES: f64 = 20.0;

/// The deviation of the part of a single wait that is in vain by chance: of something between nothing and all, about that of any part alike.
const DEVIATION: f64 = 0.3;

/// Deviations that chance explains.
const CHANCE: f64 = 3.0;

/// More that come in a wait on average make no difference.
const MOST_OTHERS: f64 = 500.0;

/// What comes to a model's batches.
#[derive(Debug, Clone, Copy)]
pub(super) struct Coming {
    /// Requests a second,
    pub(super) rate: f64,
    /// in bunches of so many on average, 1 or more.
    pub(super) bunch: f64,
    /// Requests that join a batch that waits to the end at most: with one more it would be full, and go.
    pub(super) most: u32,
}

/// Watches one model's waits.
#[derive(Debug, Clone, Default)]
pub(super) struct Company {
    batches: f64,
    /// In seconds, together.
    waited: f64,
    in_vain: f64,
    /// How long waits stay away that were in vain.
    lasting: Lasting,
    /// For how many seconds nobody waits from now on.
    off_s: f64,
}

impl Company {
    /// Learns from an interval in which that came.
    pub(super) fn observe(&mut self, seen: &Seen, coming: Coming) {
        let Waits { batches, total, in_vain, .. } = seen.waits;
        let span_s = seen.span.as_secs_f64();
        self.lasting.age(span_s);
        self.off_s = (self.off_s - span_s).max(0.0);
        self.batches = self.batches * MEMORY + batches as f64;
        self.waited = self.waited * MEMORY + total.as_secs_f64();
        self.in_vain = self.in_vain * MEMORY + in_vain.as_secs_f64();
        if self.batches >= BATCHES && self.is_in_vain(coming) {
            let off_s = self.lasting.again();
            *self = Self { lasting: self.lasting, off_s, ..Self::default() };
        }
    }

    /// As long a wait as is of use, of one that may be this long.
    pub(super) fn worth(&self, wait: Duration) -> Duration {
        if self.off_s > 0.0 { Duration::ZERO } else { wait }
    }

    /// Whether much more of the waits is in vain than if as many came at random, nearer to all than to that.
    fn is_in_vain(&self, coming: Coming) -> bool {
        let by_chance = coming.in_vain_by_chance(self.waited / self.batches);
        let more = self.in_vain / self.waited - by_chance;
        more > ((1.0 - by_chance) / 2.0).max(CHANCE * DEVIATION / self.batches.sqrt())
    }
}

impl Coming {
    /// So much, where batches have so many rows at most and requests so many on average, at least one. The first of a batch is there, and the
    /// last would make it full.
    pub(super) fn to(rate: f64, bunch: f64, largest: u32, each: f64) -> Self {
        let requests = (f64::from(largest) / each) as u32;
        Self { rate, bunch, most: requests.saturating_sub(2) }
    }

    /// The part of a wait of so many seconds that is in vain if bunches come at random (Poisson), and no more than may: after the last of n
    /// that is one in n + 1 on average.
    fn in_vain_by_chance(self, wait: f64) -> f64 {
        let others = (self.rate * wait / self.bunch).min(MOST_OTHERS);
        let (mut chance, mut all, mut in_vain) = (1.0, 0.0, 0.0);
        for bunches in 0..=(f64::from(self.most) / self.bunch) as u32 {
            let next = f64::from(bunches) + 1.0;
            all += chance;
            in_vain += chance / next;
            chance *= others / next;
        }
        in_vain / all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WAIT: Duration = Duration::from_millis(20);

    fn coming(rate: f64) -> Coming {
        Coming { rate, bunch: 1.0, most: 30 }
    }

    /// How many of some intervals have a wait, with so many requests a second and such batches in each, that wait 20 ms.
    fn waits(rate: f64, batches: u64, in_vain: f64, intervals: u32) -> u32 {
        waits_for(coming(rate), batches, in_vain, intervals)
    }

    fn waits_for(coming: Coming, batches: u64, in_vain: f64, intervals: u32) -> u32 {
        let mut company = Company::default();
        let total = WAIT * batches as u32;
        let waits = Waits { batches, total, in_vain: total.mul_f64(in_vain), ..Waits::default() };
        let span = Duration::from_millis(500);
        let mut waiting = 0;
        for _ in 0..intervals {
            let waits = if company.worth(WAIT).is_zero() { Waits::default() } else { waits };
            company.observe(&Seen { span, waits, ..Seen::default() }, coming);
            waiting += u32::from(!company.worth(WAIT).is_zero());
        }
        waiting
    }

    #[test]
    fn waits_that_bring_nobody_end() {
        assert_eq!(waits(150.0, 20, 0.95, 10), 0, "four clients that come together");
        assert_eq!(waits(45.0, 20, 1.0, 10), 0, "one that waits for his answers");
        // After 240 intervals they are tried again.
        assert_eq!(waits(150.0, 20, 0.95, 240 + 480), 1);
    }

    #[test]
    fn company_that_comes_at_random_is_waited_for() {
        // In 20 ms 3, 1, and 0.1 come on average.
        for (rate, in_vain) in [(150.0, 0.32), (50.0, 0.63), (5.0, 0.96), (5.0, 1.0)] {
            assert_eq!(waits(rate, 20, in_vain, 10), 10, "{rate}");
        }
        assert_eq!(waits(150.0, 20, 0.5, 10), 10, "in bursts");
        assert_eq!(waits(150.0, 3, 0.95, 10), 10, "too few to tell");
        assert_eq!(waits(0.0, 0, 0.0, 10), 10);
    }

    #[test]
    fn by_chance_as_much_is_in_vain_as_where_arrivals_are_drawn() {
        // Of a Poisson process's arrivals in a span, the time from the last to the end: (1 - e^-m) / m.
        for others in [0.1, 1.0, 3.0] {
            let all = (1.0 - f64::exp(-others)) / others;
            assert!((coming(others).in_vain_by_chance(1.0) - all).abs() < 1e-9);
        }
        let of_at_most = |most: u32, rate: f64| Coming { most, ..coming(rate) }.in_vain_by_chance(1.0);
        assert_eq!([0.0, 3.0, 1e9].map(|rate| of_at_most(0, rate)), [1.0; 3], "nobody may come");
        // None or one, one three times as often: a quarter of the waits in vain, three quarters half of it.
        assert!((of_at_most(1, 3.0) - (0.25 + 0.75 / 2.0)).abs() < 1e-9);
        assert!((of_at_most(1_000, 1e9) - 1.0 / 501.0).abs() < 1e-3, "bounded, and a number");
        let in_bunches = Coming { bunch: 3.0, ..coming(9.0) }.in_vain_by_chance(1.0);
        assert!((in_bunches - of_at_most(10, 3.0)).abs() < 1e-9);
    }

    #[test]
    fn a_batch_that_waits_to_the_end_is_neither_empty_nor_full() {
        let most = |largest, each| Coming::to(150.0, 1.0, largest, each).most;
        assert_eq!([1, 2, 3, 16].map(|largest| most(largest, 1.0)), [0, 0, 1, 14]);
        assert_eq!([4.0, 3.0].map(|each| most(16, each)), [2, 3]);
    }

    #[test]
    fn waits_that_end_without_a_full_batch_are_those_to_which_few_came() {
        // Three come in 20 ms on average, but of four rows only the batches to which two came at most wait to the end.
        let small = Coming { most: 2, ..coming(150.0) };
        assert_eq!(waits_for(small, 400, 0.6, 10), 10);
        assert_eq!(waits_for(coming(150.0), 400, 0.7, 10), 0, "as many as want may come");
        assert_eq!(waits_for(small, 400, 0.9, 10), 0);
    }

    #[test]
    fn a_day_later_it_begins_anew() {
        let mut company = Company::default();
        (0..7).for_each(|_| _ = company.lasting.again());
        company.observe(&Seen { span: Duration::from_secs(86_400), ..Seen::default() }, coming(0.0));
        assert_eq!(company.lasting.again(), 120.0);
    }
}
