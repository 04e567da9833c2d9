//! Requests, and those of them that missed their SLOs.

use std::ops::AddAssign;

use super::super::Seen;

/// How many came, and how many of these were late or refused.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Tally {
    pub(super) arrived: f64,
    pub(super) missed: f64,
}

impl Tally {
    /// Those of an interval.
    pub(super) fn of(seen: &Seen) -> Self {
        Self { arrived: seen.arrived as f64, missed: seen.missed() as f64 }
    }

    /// The part that missed its SLO; none while nothing is known.
    pub(super) fn part(self) -> f64 {
        self.missed / self.arrived.max(1.0)
    }
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.arrived += other.arrived;
        self.missed += other.missed;
    }
}
