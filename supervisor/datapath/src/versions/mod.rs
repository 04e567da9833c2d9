//! Two versions of a model beside each other: the part of the requests that the new version answers, and
//! the copies of requests that it gets.

mod canary;
mod mirror;

pub use canary::{Canary, CanarySplit};
pub use mirror::{AnswerDifference, Mirror, MirrorCounts, MirrorLedger, MirrorRules};

use std::sync::atomic::{AtomicU64, Ordering};

/// A counter that selects a fraction of events at equal distances.
#[derive(Debug, Default)]
struct FractionCounter {
    events: AtomicU64,
}

impl FractionCounter {
    /// Counts an event, and returns whether it belongs to the fraction, which is from 0 to 1.
    fn selects(&self, fraction: f64) -> bool {
        let before = self.events.fetch_add(1, Ordering::Relaxed) as f64;
        ((before + 1.0) * fraction).floor() > (before * fraction).floor()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fraction_of_events_is_selected_at_equal_distances() {
        for (fraction, expected) in [(0.0, 0), (0.01, 10), (0.05, 50), (0.5, 500), (1.0, 1000)] {
            let events = FractionCounter::default();
            let selected: Vec<usize> = (0..1000).filter(|_| events.selects(fraction)).collect();
            assert_eq!(selected.len(), expected, "{fraction}");
            let most = selected.windows(2).map(|pair| pair[1] - pair[0]).max();
            assert!(most.is_none_or(|most| most as f64 <= 1.0 / fraction + 1.0), "{fraction}");
        }
    }
}
