//! What is asked of a GPU, over a minute: whether that is as it was.

use std::collections::BTreeMap;

/// What is asked is the mean over about so many seconds, so that bursts do not change it.
const MEMORY_S: f64 = 60.0;

/// A load is another if it differs by this factor,
const FACTOR: f64 = 1.5;

/// and by this part of the GPU.
const PART: f64 = 0.05;

/// The part of a GPU that each priority's demand takes, with those above it.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Loads {
    seconds: f64,
    parts: BTreeMap<u32, f64>,
}

impl Loads {
    /// Learns what was asked in an interval of so many seconds.
    pub(super) fn observe(&mut self, now: impl Iterator<Item = (u32, f64)>, seconds: f64) {
        self.seconds = (self.seconds + seconds).min(MEMORY_S);
        let weight = (seconds / self.seconds.max(f64::MIN_POSITIVE)).min(1.0);
        let mean = |(priority, part)| {
            let before = self.parts.get(&priority).copied().unwrap_or(part);
            (priority, before + weight * (part - before))
        };
        self.parts = now.map(mean).collect();
    }

    /// Whether nothing much has changed since.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        let alike = |(one, other): (&f64, &f64)| {
            (one - other).abs() <= PART || one.max(*other) <= FACTOR * one.min(*other)
        };
        self.parts.keys().eq(other.parts.keys()) && self.parts.values().zip(other.parts.values()).all(alike)
    }
}

/// For how long loads have stayed about the same.
#[derive(Debug, Clone, Default)]
pub(super) struct Steady {
    under: Loads,
    seconds: f64,
}

impl Steady {
    /// Learns the loads after an interval of so many seconds.
    pub(super) fn observe(&mut self, loads: &Loads, seconds: f64) {
        if loads.is_like(&self.under) {
            self.seconds += seconds;
        } else {
            *self = Self { under: loads.clone(), seconds: 0.0 };
        }
    }

    pub(super) fn seconds(&self) -> f64 {
        self.seconds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// So much of the GPU for two priorities, in so many half seconds.
    fn observe(loads: &mut Loads, parts: [f64; 2], intervals: u32) {
        (0..intervals).for_each(|_| loads.observe([(1, parts[0]), (3, parts[1])].into_iter(), 0.5));
    }

    fn after(parts: [f64; 2]) -> Loads {
        let mut loads = Loads::default();
        observe(&mut loads, parts, 1_000);
        loads
    }

    #[test]
    fn what_changed_little_or_for_a_moment_is_as_it_was() {
        let then = after([0.1, 0.4]);
        for alike in [[0.1, 0.4], [0.14, 0.55], [0.06, 0.3]] {
            assert!(then.is_like(&after(alike)) && after(alike).is_like(&then), "{alike:?}");
        }
        for other in [[0.16, 0.4], [0.1, 0.65], [0.1, 0.25]] {
            assert!(!then.is_like(&after(other)) && !after(other).is_like(&then), "{other:?}");
        }
        let mut burst = then.clone();
        observe(&mut burst, [0.2, 1.0], 20);
        assert!(then.is_like(&burst));
        observe(&mut burst, [0.2, 1.0], 40);
        assert!(!then.is_like(&burst));
    }

    #[test]
    fn the_first_minute_is_a_plain_mean() {
        let mut loads = Loads::default();
        [[0.2, 0.4], [0.4, 0.8]].into_iter().for_each(|parts| observe(&mut loads, parts, 20));
        assert!((loads.parts[&1] - 0.3).abs() < 0.01 && (loads.parts[&3] - 0.6).abs() < 0.01, "{loads:?}");
    }

    #[test]
    fn an_interval_longer_than_what_is_remembered_is_all_that_counts() {
        let mut loads = Loads::default();
        for part in [0.2, 0.4].repeat(10) {
            loads.observe([(1, part)].into_iter(), 150.0);
            assert_eq!(loads.parts[&1], part);
        }
    }

    #[test]
    fn another_priority_is_another_load() {
        let mut fewer = Loads::default();
        fewer.observe([(1, 0.1)].into_iter(), 0.5);
        assert!(!fewer.is_like(&after([0.1, 0.1])));
    }
}
