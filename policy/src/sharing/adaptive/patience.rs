//! How much of the longest wait for company batches may have, by what became of those that waited.
//!
//! The longest wait leaves room for a batch that takes its mean time, and somewhat more. Where times vary by far more, as on a
//! GPU whose kernels queue behind others', waits make requests late that would have been in time.

use std::time::Duration;

use super::super::Seen;
use super::chance::surplus;
use super::lasting::Lasting;

/// Nothing is said of fewer answers.
const ANSWERS: f64 = 20.0;

/// Waits are to blame only if this part of the batches waited to the end: others were kept by the lane, or were full.
const WAITED: f64 = 0.25;

/// Of less than this part there is nothing to be had.
const LEAST: f64 = 0.25;

/// Watches one model's answers.
#[derive(Debug, Clone)]
pub(super) struct Patience {
    part: f64,
    lasting: Lasting,
    /// For how many seconds the part stays as it is.
    stays_s: f64,
}

impl Default for Patience {
    fn default() -> Self {
        Self { part: 1.0, lasting: Lasting::default(), stays_s: 0.0 }
    }
}

impl Patience {
    /// Learns from an interval, where this part of the answers may miss the SLO.
    pub(super) fn observe(&mut self, seen: &Seen, may_miss: f64) {
        let span_s = seen.span.as_secs_f64();
        self.lasting.age(span_s);
        self.stays_s = (self.stays_s - span_s).max(0.0);
        if is_to_blame(seen, may_miss) {
            self.part = if self.part > LEAST { self.part / 2.0 } else { 0.0 };
            self.stays_s = self.lasting.again();
        } else if self.part < 1.0 && self.stays_s <= 0.0 {
            *self = Self { lasting: self.lasting, ..Self::default() };
        }
    }

    /// How long a batch waits that may wait so long.
    pub(super) fn of(&self, longest: Duration) -> Duration {
        longest.mul_f64(self.part)
    }
}

/// Whether more answers were late than may be, after batches waited; not where the load is to blame, for which more are refused.
fn is_to_blame(seen: &Seen, may_miss: f64) -> bool {
    let answered = seen.answered as f64;
    let late = seen.answered.saturating_sub(seen.in_time) as f64;
    let allowed = answered * may_miss;
    let batches: u64 = seen.executed.iter().map(|executed| executed.count).sum();
    answered >= ANSWERS
        && seen.waits.batches as f64 > WAITED * batches as f64
        && late > seen.refused as f64
        && late > allowed + surplus(allowed)
}

#[cfg(test)]
mod tests {
    use super::super::super::Executed;
    use super::*;
    use crate::batcher::Waits;

    const WAIT: Duration = Duration::from_millis(4);

    /// Half a second in which a hundred batches gave two hundred answers, so many of them late, after so many waits.
    fn interval(late: u64, waited: u64) -> Seen {
        let waits = Waits { batches: waited, total: WAIT * waited as u32, ..Waits::default() };
        let executed = vec![Executed { rows: 2, count: 100, mean: Duration::from_millis(2) }];
        let (span, answered) = (Duration::from_millis(500), 200);
        Seen {
            span,
            arrived: answered,
            answered,
            in_time: answered - late,
            waits,
            executed,
            ..Seen::default()
        }
    }

    fn after(intervals: u32, seen: &Seen) -> Patience {
        let mut patience = Patience::default();
        (0..intervals).for_each(|_| patience.observe(seen, 0.01));
        patience
    }

    #[test]
    fn waits_that_make_answers_late_are_cut_to_nothing() {
        let waits = [1, 2, 3, 4, 9].map(|intervals| after(intervals, &interval(20, 60)).of(WAIT));
        assert_eq!(waits, [WAIT / 2, WAIT / 4, Duration::ZERO, Duration::ZERO, Duration::ZERO]);
    }

    #[test]
    fn what_was_no_fault_of_theirs_cuts_none() {
        for (late, waited) in [(0, 100), (2, 100), (6, 100), (200, 20), (200, 0)] {
            assert_eq!(after(9, &interval(late, waited)).of(WAIT), WAIT, "{late} late, {waited} waited");
        }
        let few = Seen { answered: 19, in_time: 0, ..interval(0, 60) };
        assert_eq!(after(9, &few).of(WAIT), WAIT, "too few to tell");
    }

    #[test]
    fn they_are_tried_again_and_stay_away_for_longer_each_time() {
        let mut patience = Patience::default();
        for quiet in [240, 480, 960] {
            patience.observe(&interval(20, 60), 0.01);
            for _ in 1..quiet {
                patience.observe(&interval(0, 60), 0.01);
            }
            assert_eq!(patience.of(WAIT), WAIT / 2);
            patience.observe(&interval(0, 60), 0.01);
            assert_eq!(patience.of(WAIT), WAIT, "after {quiet} intervals");
        }
    }

    #[test]
    fn a_bad_hour_is_not_held_against_it_for_ever() {
        let mut patience = Patience::default();
        (0..2).for_each(|_| patience.observe(&interval(20, 50), 0.01));
        assert_eq!(patience.stays_s, 240.0);
        patience.observe(&Seen { span: Duration::from_secs(86_400), ..Seen::default() }, 0.01);
        patience.observe(&interval(20, 50), 0.01);
        assert_eq!(patience.stays_s, 120.0);
    }
}
