//! The search for the highest rate at which models meet their SLOs.

/// The number of rates that a search tries.
const MAX_TRIES: u32 = 6;

/// The step of an ascent, relative to its start.
const STEP: f64 = 0.1;

/// A search for the highest rate that holds.
#[derive(Debug)]
pub(super) struct RateSearch {
    /// The highest rate that held, or 0.
    holds: f64,
    /// The lowest rate that failed.
    fails: f64,
    tries: u32,
    order: SearchOrder,
}

#[derive(Debug, Clone, Copy)]
enum SearchOrder {
    /// The next rate is halfway between one that holds and one that fails.
    Bisection,
    /// The next rate is one step above those that hold. If the first rate fails, the search descends.
    Ascent { start: f64 },
}

impl RateSearch {
    /// Creates a search by bisection between 0 and `limit`, which does not hold. The result is exact to 1/64
    /// of `limit`.
    pub(super) fn below(limit: f64) -> Self {
        Self { holds: 0.0, fails: limit, tries: 0, order: SearchOrder::Bisection }
    }

    /// Creates a search that begins at `start`. Use it for a policy that keeps a layout for a while after
    /// rates that did not hold. The result is exact to [`STEP`] of `start`.
    pub(super) fn from(start: f64) -> Self {
        Self { holds: 0.0, fails: f64::INFINITY, tries: 0, order: SearchOrder::Ascent { start } }
    }

    /// Returns the next rate to try, or `None` at the end of the search.
    pub(super) fn next(&self) -> Option<f64> {
        let next = match self.order {
            SearchOrder::Bisection => f64::midpoint(self.holds, self.fails),
            SearchOrder::Ascent { start } if self.tries == 0 => start,
            SearchOrder::Ascent { start } if self.holds > 0.0 => self.holds + start * STEP,
            SearchOrder::Ascent { start } => self.fails - start * STEP,
        };
        let is_known = self.holds > 0.0 && next >= self.fails - f64::EPSILON;
        (self.tries < MAX_TRIES && !is_known).then_some(next)
    }

    /// Records the result of `rate`, which [`next`](Self::next) returned.
    pub(super) fn record(&mut self, rate: f64, holds: bool) {
        *(if holds { &mut self.holds } else { &mut self.fails }) = rate;
        self.tries += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the best rate that a search finds, and the rates that it tried.
    fn search(mut search: RateSearch, highest: f64) -> (f64, Vec<f64>) {
        let (mut best, mut tried) = (0.0, Vec::new());
        while let Some(rate) = search.next() {
            search.record(rate, rate <= highest);
            best = if rate <= highest { rate } else { best };
            tried.push(rate);
        }
        (best, tried)
    }

    #[test]
    fn bisection_ends_just_below_the_highest_rate_that_holds() {
        for highest in [0.0, 3.0, 500.0, 999.0] {
            let (best, tried) = search(RateSearch::below(1_000.0), highest);
            assert!(best <= highest && best > highest - 1_000.0 / 64.0, "{best} for {highest}");
            assert_eq!(tried.len(), 6);
        }
    }

    #[test]
    fn an_ascent_rises_until_a_rate_fails_and_descends_if_the_first_one_fails() {
        assert_eq!(search(RateSearch::from(100.0), 125.0), (120.0, vec![100.0, 110.0, 120.0, 130.0]));
        assert_eq!(search(RateSearch::from(100.0), 85.0), (80.0, vec![100.0, 90.0, 80.0]));
        assert_eq!(search(RateSearch::from(100.0), 900.0).0, 150.0);
        assert_eq!(search(RateSearch::from(100.0), 5.0).0, 0.0);
    }
}
