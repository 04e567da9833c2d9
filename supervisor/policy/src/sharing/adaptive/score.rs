//! The misses under a layout, and the comparison of two layouts by their misses.

use std::cmp::Ordering;

/// The weight of the misses of a priority, relative to the weight of the misses of the next lower
/// priority.
const PRIORITY_WEIGHT: f64 = 4.0;

/// The variance of miss counts, relative to the variance if requests missed independently of each
/// other. It is above 1, because requests of one batch or one burst usually miss together. In simulated
/// overloads, this ratio was 3 to 13.
const VARIANCE_FACTOR: f64 = 4.0;

/// The number of requests that ended, and the number of ended requests that missed their SLO.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Misses {
    pub(super) ended: u64,
    pub(super) missed: u64,
}

/// The misses under one layout by priority, with the highest priority first.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Score(Vec<Misses>);

impl Misses {
    /// Returns the fraction of the requests that missed, 0 to 1.
    pub(super) fn part(self) -> f64 {
        self.missed as f64 / self.ended.max(1) as f64
    }

    /// Returns the variance of the difference between two miss rates.
    fn variance(self, other: Self) -> f64 {
        let (ended, missed) = (self.ended + other.ended, self.missed + other.missed);
        // Without the added miss and the two added requests, the variance would be zero if no request
        // missed.
        let mean = (missed as f64 + 1.0) / (ended as f64 + 2.0);
        let counts = 1.0 / self.ended.max(1) as f64 + 1.0 / other.ended.max(1) as f64;
        VARIANCE_FACTOR * mean * (1.0 - mean) * counts
    }
}

/// Returns the weighted sum of miss rates, which are ordered from the highest priority to the lowest.
/// The weight of each priority is [`PRIORITY_WEIGHT`] times that of the next one.
pub(super) fn weighted(missed: impl Iterator<Item = f64>) -> f64 {
    missed.zip(weights()).map(|(missed, weight)| missed * weight).sum()
}

fn weights() -> impl Iterator<Item = f64> {
    std::iter::successors(Some(1.0), |weight| Some(weight / PRIORITY_WEIGHT))
}

impl Score {
    pub(super) fn new(priorities: usize) -> Self {
        Self(vec![Misses::default(); priorities])
    }

    /// Returns an empty score with the same number of priorities.
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

    /// Returns the sum of the misses of all priorities.
    pub(super) fn total(&self) -> Misses {
        self.0.iter().fold(Misses::default(), |sum, misses| Misses {
            ended: sum.ended + misses.ended,
            missed: sum.missed + misses.missed,
        })
    }

    /// Returns the [weighted] sum of the miss rates of all priorities.
    pub(super) fn loss(&self) -> f64 {
        weighted(self.0.iter().map(|misses| misses.part()))
    }

    /// Returns `Less` if this layout is better, and `Equal` if chance explains the difference.
    pub(super) fn compared(&self, other: &Self) -> Ordering {
        beyond_chance(self.loss() - other.loss(), self.deviation(other))
    }

    /// Returns true if this layout is so much worse that a longer measurement would hardly change the
    /// result.
    pub(super) fn is_certainly_worse(&self, other: &Self) -> bool {
        beyond_chance(self.loss() - other.loss(), 2.0 * self.deviation(other)).is_gt()
    }

    /// Returns true if fewer requests of the highest priority missed, and chance does not explain the
    /// difference.
    pub(super) fn saves_first(&self, other: &Self) -> bool {
        let (own, other) = (self.first(), other.first());
        beyond_chance(own.part() - other.part(), own.variance(other).sqrt()).is_lt()
    }

    /// Returns the standard deviation of the difference between two losses.
    fn deviation(&self, other: &Self) -> f64 {
        let levels = self.0.iter().zip(&other.0).zip(weights());
        levels.map(|((own, other), weight)| own.variance(*other) * weight.powi(2)).sum::<f64>().sqrt()
    }
}

fn beyond_chance(difference: f64, chance: f64) -> Ordering {
    if difference.abs() <= chance { Ordering::Equal } else { difference.total_cmp(&0.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a score in which each priority had 1,000 requests. `percents` are the percentages that
    /// missed.
    fn score(percents: &[u64]) -> Score {
        Score(percents.iter().map(|percent| Misses { ended: 1000, missed: 10 * percent }).collect())
    }

    #[test]
    fn a_priority_counts_as_four_of_the_next() {
        assert_eq!(score(&[1, 50]).compared(&score(&[20, 0])), Ordering::Less);
        assert_eq!(score(&[1, 90]).compared(&score(&[20, 0])), Ordering::Greater);
        assert_eq!(score(&[1, 30]).compared(&score(&[1, 10])), Ordering::Greater);
        assert_eq!(score(&[0, 0, 50]).compared(&score(&[0, 20, 0])), Ordering::Less);
    }

    #[test]
    fn chance_is_no_difference() {
        assert_eq!(score(&[10]).compared(&score(&[11])), Ordering::Equal);
        let few = |missed: u64| Score(vec![Misses { ended: 20, missed }]);
        assert_eq!(few(2).compared(&few(6)), Ordering::Equal);
        assert_eq!(few(2).compared(&few(18)), Ordering::Less);
        assert_eq!(Score::new(2).compared(&Score::new(2)), Ordering::Equal);
    }

    #[test]
    fn a_layout_is_certainly_worse_only_with_enough_counts() {
        let of = |ended: u64, missed: u64| Score(vec![Misses { ended, missed }]);
        assert!(!of(60, 15).is_certainly_worse(&of(60, 5)));
        assert!(of(600, 150).is_certainly_worse(&of(600, 50)));
        assert!(!of(600, 50).is_certainly_worse(&of(600, 150)));
    }

    #[test]
    fn the_first_priority_is_saved_by_its_own_requests_alone() {
        assert!(score(&[1, 90]).saves_first(&score(&[20, 0])));
        assert!(!score(&[1, 0]).saves_first(&score(&[1, 90])));
    }
}
