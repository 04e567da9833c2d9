//! What a layout was seen to miss, and which of two layouts is the better one.

use std::cmp::Ordering;

/// The variance of counts is so many times that of requests that miss independently: those of a
/// batch, and of a moment in which many came, miss together. In simulated overloads it was 3 to 13
/// times.
const CLUSTERED: f64 = 4.0;

/// A difference counts if it is larger than so many standard deviations: for the choice of the best
/// layout, where a mistake costs little, and for leaving one out for good.
const LIKELY: f64 = 1.0;
const CERTAIN: f64 = 2.0;

/// A smaller part of the requests is no difference, however many were counted.
const LEAST: f64 = 0.01;

/// The misses of the first priority are known well enough to look at the next one if chance moves
/// their difference by less than this.
const KNOWN: f64 = 0.02;

/// In [`Score::loss`] a request counts as so many of the next lower priority.
const WORTH: f64 = 4.0;

/// The requests of one priority that ended, and those of them that missed their objective.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Misses {
    pub(super) ended: u64,
    pub(super) missed: u64,
}

/// The misses under one layout, by priority, the highest first.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Score(Vec<Misses>);

impl Misses {
    /// Returns the part of the requests that missed, 0 to 1.
    pub(super) fn part(self) -> f64 {
        self.missed as f64 / self.ended.max(1) as f64
    }

    /// Returns the standard deviation of the difference between two parts that missed.
    fn deviation(self, other: Self) -> f64 {
        let (ended, missed) = (self.ended + other.ended, self.missed + other.missed);
        // One more of each keeps the variance above zero where nothing missed.
        let mean = (missed as f64 + 1.0) / (ended as f64 + 2.0);
        let counts = 1.0 / self.ended.max(1) as f64 + 1.0 / other.ended.max(1) as f64;
        (CLUSTERED * mean * (1.0 - mean) * counts).sqrt()
    }

    /// Says whether fewer missed (`Less`) or more, by more than so many standard deviations.
    fn compared(self, other: Self, deviations: f64) -> Ordering {
        let difference = self.part() - other.part();
        if difference.abs() <= (deviations * self.deviation(other)).max(LEAST) {
            return Ordering::Equal;
        }
        difference.total_cmp(&0.0)
    }
}

impl Score {
    pub(super) fn new(priorities: usize) -> Self {
        Self(vec![Misses::default(); priorities])
    }

    /// Returns a score of as many priorities in which nothing was seen.
    pub(super) fn blank(&self) -> Self {
        Self::new(self.0.len())
    }

    pub(super) fn first(&self) -> Misses {
        self.0.first().copied().unwrap_or_default()
    }

    pub(super) fn add(&mut self, level: usize, Misses { ended, missed }: Misses) {
        if let Some(sum) = self.0.get_mut(level) {
            sum.ended += ended;
            sum.missed += missed;
        }
    }

    pub(super) fn add_all(&mut self, other: &Self) {
        for (level, &misses) in other.0.iter().enumerate() {
            self.add(level, misses);
        }
    }

    /// Returns the misses of all priorities together.
    pub(super) fn total(&self) -> Misses {
        self.0.iter().fold(Misses::default(), |sum, misses| Misses {
            ended: sum.ended + misses.ended,
            missed: sum.missed + misses.missed,
        })
    }

    /// Whether fewer requests of the first priority missed, by more than chance.
    pub(super) fn saves_first(&self, other: &Self) -> bool {
        self.first().compared(other.first(), LIKELY).is_lt()
    }

    /// Returns the parts that missed, by priority, each counted as `WORTH` of the next lower one.
    pub(super) fn loss(&self) -> f64 {
        self.0.iter().zip(0_i32..).map(|(misses, level)| misses.part() / WORTH.powi(level)).sum()
    }

    /// Returns `Less` for the better layout: the first priority that differs decides, and where
    /// none does, all requests together. `Equal` says that chance explains all differences.
    pub(super) fn compared(&self, other: &Self) -> Ordering {
        self.compared_by(other, LIKELY)
    }

    fn compared_by(&self, other: &Self, deviations: f64) -> Ordering {
        let levels = self.0.iter().zip(&other.0).map(|(one, other)| one.compared(*other, deviations));
        let all = || self.total().compared(other.total(), deviations);
        levels.fold(Ordering::Equal, Ordering::then).then_with(all)
    }

    /// Whether more counts would hardly make this the better one.
    pub(super) fn is_certainly_worse(&self, other: &Self) -> bool {
        let first = self.first().compared(other.first(), CERTAIN);
        let known = CERTAIN * self.first().deviation(other.first()) <= KNOWN;
        first.is_gt() || known && self.compared_by(other, CERTAIN).is_gt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// So many of a hundred requests missed, by priority, a thousand requests each.
    fn score(percents: &[u64]) -> Score {
        Score(percents.iter().map(|percent| Misses { ended: 1000, missed: 10 * percent }).collect())
    }

    #[test]
    fn the_highest_priority_that_differs_decides() {
        assert_eq!(score(&[1, 90]).compared(&score(&[20, 0])), Ordering::Less);
        assert_eq!(score(&[1, 30]).compared(&score(&[1, 10])), Ordering::Greater);
        assert_eq!(score(&[1, 10]).compared(&score(&[1, 10])), Ordering::Equal);
    }

    #[test]
    fn what_chance_explains_is_no_difference() {
        assert_eq!(score(&[10, 30]).compared(&score(&[11, 10])), Ordering::Greater, "1 of 100 is chance");
        let few = |missed: u64| Score(vec![Misses { ended: 20, missed }]);
        assert_eq!(few(2).compared(&few(6)), Ordering::Equal);
        assert_eq!(few(2).compared(&few(18)), Ordering::Less);
    }

    #[test]
    fn differences_too_small_for_any_priority_count_together() {
        let all = |percent: u64| score(&[percent; 4]);
        assert_eq!(all(8).compared(&all(10)), Ordering::Less);
        assert_eq!(score(&[8]).compared(&score(&[10])), Ordering::Equal);
    }

    #[test]
    fn a_layout_is_left_out_for_a_lower_priority_once_the_first_is_known() {
        let of = |first: u64, ended: u64| {
            let first = Misses { ended, missed: first };
            Score(vec![first, Misses { ended: 1000, missed: 800 }])
        };
        let good = |ended| Score(vec![Misses { ended, missed: 0 }, Misses { ended: 1000, missed: 100 }]);
        assert!(!of(0, 60).is_certainly_worse(&good(60)), "60 requests say little of the first");
        assert!(of(0, 3000).is_certainly_worse(&good(3000)));
        assert!(of(30, 60).is_certainly_worse(&good(60)));
    }

    #[test]
    fn nothing_seen_is_equal_to_anything() {
        assert_eq!(Score::new(2).compared(&Score::new(2)), Ordering::Equal);
    }
}
