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
    /// Learns from an interval, while so many requests a second came.
    pub(super) fn observe(&mut self, seen: &Seen, rate: f64) {
        let Waits { batches, total, in_vain, .. } = seen.waits;
        let span_s = seen.span.as_secs_f64();
        self.lasting.age(span_s);
        self.off_s = (self.off_s - span_s).max(0.0);
        self.batches = self.batches * MEMORY + batches as f64;
        self.waited = self.waited * MEMORY + total.as_secs_f64();
        self.in_vain = self.in_vain * MEMORY + in_vain.as_secs_f64();
        if self.batches >= BATCHES && self.is_in_vain(rate) {
            let off_s = self.lasting.again();
            *self = Self { lasting: self.lasting, off_s, ..Self::default() };
        }
    }

    /// As long a wait as is of use, of one that may be this long.
    pub(super) fn worth(&self, wait: Duration) -> Duration {
        if self.off_s > 0.0 { Duration::ZERO } else { wait }
    }

    /// Whether much more of the waits is in vain than if as many came at random, nearer to all than to that.
    fn is_in_vain(&self, rate: f64) -> bool {
        let others = rate * self.waited / self.batches;
        // From the last of a Poisson process's arrivals in a span to its end; the whole span if there is none.
        let by_chance = if others > 0.0 { -(-others).exp_m1() / others } else { 1.0 };
        let more = self.in_vain / self.waited - by_chance;
        more > ((1.0 - by_chance) / 2.0).max(CHANCE * DEVIATION / self.batches.sqrt())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WAIT: Duration = Duration::from_millis(20);

    /// How many of some intervals have a wait, with so many requests a second and such batches in each, that wait 20 ms.
    fn waits(rate: f64, batches: u64, in_vain: f64, intervals: u32) -> u32 {
        let mut company = Company::default();
        let total = WAIT * batches as u32;
        let waits = Waits { batches, total, in_vain: total.mul_f64(in_vain), ..Waits::default() };
        let span = Duration::from_millis(500);
        let mut waiting = 0;
        for _ in 0..intervals {
            let waits = if company.worth(WAIT).is_zero() { Waits::default() } else { waits };
            company.observe(&Seen { span, waits, ..Seen::default() }, rate);
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
    fn a_day_later_it_begins_anew() {
        let mut company = Company::default();
        (0..7).for_each(|_| _ = company.lasting.again());
        company.observe(&Seen { span: Duration::from_secs(86_400), ..Seen::default() }, 0.0);
        assert_eq!(company.lasting.again(), 120.0);
    }
}
