//! Whether a model is short of SMs, so that the others' batches wait for company, and lower priorities are refused for its sake.
//!
//! A larger batch takes less of the GPU for each request, and somebody has to wait for it. That is worth it where others lack what it saves;
//! where nobody does, all are answered sooner without. So batches wait while another model on the GPU misses its SLO, or executes all the time
//! in batches that are nearly as large as they may be, unless theirs is the higher priority: who keeps his SLO has no claim on that. On an
//! H200 with room for all, waits for no reason made latencies two to four times as long (docs/measurements/adaptive.md).

use super::super::Seen;
use super::chance::surplus;
use super::tally::Tally;

/// Who was short of SMs counts as that for so many seconds,
const STAYS_S: f64 = 40.0;

/// and who missed his SLO in one interval for so many: a host hesitates now and then.
const ONCE_S: f64 = 2.0;

/// It is not once if it comes again within so many seconds.
const AGAIN_S: f64 = 10.0;

/// Who executes for this part of the time, times the part of the largest batch that a batch has, has much to do.
const MUCH: f64 = 0.7;

/// So many requests without more misses than chance explains say that there are none; of fewer, those of the intervals before count, too,
const REQUESTS: f64 = 20.0;

/// for so many seconds.
const WITHIN_S: f64 = 60.0;

/// Watches one model.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Shortage {
    /// What came of late, as long as it says nothing.
    few: Few,
    /// For how many seconds more it counts as one that misses its SLO,
    missing_s: f64,
    /// and as one that fills its batches.
    filling_s: f64,
    /// For how many seconds more another interval of misses is not the first.
    warned_s: f64,
}

impl Shortage {
    /// Learns from an interval, where this part of the requests may miss the SLO and batches may have so many rows.
    pub(super) fn observe(&mut self, seen: &Seen, may_miss: f64, max_batch: u32) {
        let later = |left_s: f64| (left_s - seen.span.as_secs_f64()).max(0.0);
        self.filling_s = if fills(seen, max_batch) { STAYS_S } else { later(self.filling_s) };
        (self.missing_s, self.warned_s) = if !self.few.misses_with(seen, may_miss) {
            (later(self.missing_s), later(self.warned_s))
        } else if self.warned_s > 0.0 {
            (STAYS_S, AGAIN_S)
        } else {
            (self.missing_s.max(ONCE_S), AGAIN_S)
        };
    }

    /// Whether it misses its SLO, or did not long ago.
    pub(super) fn is_missing(self) -> bool {
        self.missing_s > 0.0
    }

    /// Whether another model's batches should wait for its sake, who may have the higher priority.
    pub(super) fn asks(self, of_higher: bool) -> bool {
        self.is_missing() || !of_higher && self.filling_s > 0.0
    }
}

/// Requests of which nothing can be said yet.
#[derive(Debug, Clone, Copy, Default)]
struct Few {
    seconds: f64,
    came: Tally,
}

impl Few {
    /// Whether with those of an interval more missed the SLO than may, and than chance explains.
    fn misses_with(&mut self, seen: &Seen, may_miss: f64) -> bool {
        self.seconds += seen.span.as_secs_f64();
        self.came += Tally::of(seen);
        let allowed = self.came.arrived * may_miss;
        let misses = self.came.missed > allowed + surplus(allowed);
        if misses || self.came.arrived >= REQUESTS || self.seconds >= WITHIN_S {
            *self = Self::default();
        }
        misses
    }
}

/// Whether there was little time left and little room in batches.
fn fills(seen: &Seen, max_batch: u32) -> bool {
    let (batches, rows) = seen.executed.iter().fold((0.0, 0.0), |(batches, rows), executed| {
        let count = executed.count as f64;
        (batches + count, rows + count * f64::from(executed.rows))
    });
    seen.busy * rows > MUCH * batches * f64::from(max_batch)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::super::Executed;
    use super::*;

    /// Half a second with a hundred requests of which so many missed, in batches of so many rows that executed for that part of the time.
    fn seen(missed: u64, rows: u32, busy: f64) -> Seen {
        let executed = vec![Executed { rows, count: 100 / u64::from(rows), mean: Duration::from_millis(1) }];
        let span = Duration::from_millis(500);
        Seen { span, arrived: 100, answered: 100, in_time: 100 - missed, busy, executed, ..Seen::default() }
    }

    /// Whether somebody is short after that of whose requests one in a hundred may miss, with batches up to sixteen rows.
    fn is_short(seen: &Seen) -> bool {
        let mut shortage = Shortage::default();
        shortage.observe(seen, 0.01, 16);
        shortage.asks(false)
    }

    #[test]
    fn who_misses_more_than_chance_explains_is_short() {
        assert_eq!([0, 4, 5, 50].map(|missed| is_short(&seen(missed, 1, 0.3))), [false, false, true, true]);
    }

    #[test]
    fn who_executes_all_the_time_in_large_batches_is_short() {
        assert!(is_short(&seen(0, 16, 0.9)) && is_short(&seen(0, 12, 1.0)));
        assert!(!is_short(&seen(0, 16, 0.5)), "he has time");
        assert!(!is_short(&seen(0, 4, 1.0)), "larger batches would do");
        assert!(!is_short(&Seen::default()), "he did nothing");
    }

    #[test]
    fn a_higher_priority_waits_for_who_misses_and_not_for_who_fills_his_batches() {
        let asks = |seen: &Seen| {
            let mut shortage = Shortage::default();
            shortage.observe(seen, 0.01, 16);
            [true, false].map(|of_higher| shortage.asks(of_higher))
        };
        assert_eq!(asks(&seen(0, 16, 1.0)), [false, true]);
        assert_eq!(asks(&seen(50, 16, 1.0)), [true, true]);
        assert_eq!(asks(&seen(50, 1, 0.3)), [true, true]);
    }

    /// The intervals until nobody asks any more, after these of half a second in which so many missed.
    fn asks_for(missed: &[u64]) -> Option<u32> {
        let mut shortage = Shortage::default();
        assert!(!shortage.asks(false), "nobody waits before it is known to be of use");
        missed.iter().for_each(|&missed| shortage.observe(&seen(missed, 1, 0.3), 0.01, 16));
        (1..=1_000).find(|_| {
            shortage.observe(&seen(0, 1, 0.3), 0.01, 16);
            !shortage.asks(true)
        })
    }

    #[test]
    fn who_misses_again_counts_as_short_for_a_while_and_who_missed_once_for_a_moment() {
        assert_eq!(asks_for(&[5]), Some(4));
        assert_eq!(asks_for(&[5, 5]), Some(80));
        let after = |intervals: usize| asks_for(&[&[5][..], &vec![0; intervals], &[5]].concat());
        assert_eq!([19, 20].map(after), [Some(80), Some(4)]);
        assert_eq!(asks_for(&[5, 5, 0, 0, 5]), Some(80));
        assert_eq!(
            asks_for(&[&[5, 5][..], &[0; 30], &[5]].concat()),
            Some(50),
            "the first is not forgotten for it"
        );
    }

    #[test]
    fn who_is_seldom_asked_is_seen_to_miss_all_the_same() {
        let one = |missed: u64| Seen { arrived: 1, answered: 1, in_time: 1 - missed, ..seen(0, 1, 0.01) };
        // The intervals until it is seen, where every so-manieth request misses.
        let seen_after = |every: u32| {
            let mut shortage = Shortage::default();
            (1..1_000).find(|interval| {
                shortage.observe(&one(u64::from(interval % every == 0)), 0.01, 16);
                shortage.is_missing()
            })
        };
        assert_eq!([1, 5, 7].map(seen_after), [Some(4), Some(20), None]);
        // Whether it is seen after the last of four that miss, so many intervals apart.
        let seen_if = |apart: u32| {
            let mut shortage = Shortage::default();
            let none = Seen { arrived: 0, answered: 0, in_time: 0, ..seen(0, 1, 0.0) };
            for interval in 0..=3 * apart {
                let seen = if interval % apart == 0 { one(1) } else { none.clone() };
                shortage.observe(&seen, 0.01, 16);
            }
            shortage.is_missing()
        };
        assert_eq!([39, 40].map(seen_if), [true, false], "within a minute");
    }
}
