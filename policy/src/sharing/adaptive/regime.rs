//! Whether caps that do not fit onto a GPU together pay there.
//!
//! Where a GPU divides itself among those who execute, generous caps cost nobody anything, and SMs follow the demand from
//! batch to batch. Where kernels take turns instead, as on an H200 (docs/measurements/contention.md), short batches are kept
//! waiting by long ones, and SLOs are missed though there is room for everybody. Which of it a GPU does, only it can
//! tell: where SLOs are missed for no want of SMs, the other way is tried, and the better one kept.

use super::super::Seen;

/// Requests miss their SLOs for no want of SMs where all demand, in full batches, takes less than this part of the GPU.
const ROOM: f64 = 0.8;

/// This part of the requests of an interval must miss theirs,
const MISSED: f64 = 0.2;

/// of at least so many,
const REQUESTS: u64 = 20;

/// in so many intervals in a row, before the other way is tried.
const INTERVALS: u32 = 4;

/// It must miss less than this part of what this one misses to be tried again.
const BETTER: f64 = 0.7;

/// What an interval weighs after the next one.
const MEMORY: f64 = 0.99;

/// A way to share a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Caps {
    /// Everybody may have what the others leave.
    Generous,
    /// They fit onto the GPU together, and are less the lower the priority.
    Fitting,
}

/// What came of one way while there was room.
#[derive(Debug, Clone, Copy, Default)]
struct Record {
    arrived: f64,
    missed: f64,
}

impl Record {
    /// The part that missed its SLO; none while nothing is known.
    fn part(&self) -> f64 {
        self.missed / self.arrived.max(1.0)
    }

    fn add(&mut self, arrived: u64, missed: u64) {
        self.arrived = self.arrived * MEMORY + arrived as f64;
        self.missed = self.missed * MEMORY + missed as f64;
    }
}

/// How one GPU is shared, and what came of it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Regime {
    fitting: bool,
    here: Record,
    there: Record,
    doubts: u32,
}

impl Regime {
    pub(super) fn new() -> Self {
        let nothing = Record { arrived: 0.0, missed: 0.0 };
        Self { fitting: false, here: nothing, there: nothing, doubts: 0 }
    }

    /// The caps to share it with.
    pub(super) fn caps(&self) -> Caps {
        if self.fitting { Caps::Fitting } else { Caps::Generous }
    }

    /// Learns from an interval in which nobody's share changed, of the models that could be carried; `load` is the part of the GPU that all demand
    /// takes at least.
    pub(super) fn observe<'s>(&mut self, seen: impl Iterator<Item = &'s Seen>, load: f64) {
        let (arrived, missed) = seen.fold((0, 0), |(arrived, missed), seen| {
            let late = seen.answered.saturating_sub(seen.in_time);
            (arrived + seen.arrived, missed + late + seen.refused)
        });
        if load >= ROOM {
            self.doubts = 0;
            return;
        }
        self.here.add(arrived, missed);
        let doubtful = arrived >= REQUESTS && missed as f64 > MISSED * arrived as f64;
        self.doubts = if doubtful { self.doubts + 1 } else { 0 };
        if self.doubts >= INTERVALS && self.there.part() < BETTER * self.here.part() {
            (self.here, self.there, self.doubts) = (self.there, self.here, 0);
            self.fitting = !self.fitting;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Intervals of a hundred requests of which so many miss.
    fn observe(regime: &mut Regime, missed: u64, load: f64, intervals: u32) -> Caps {
        let seen = Seen { arrived: 100, answered: 100, in_time: 100 - missed, ..Seen::default() };
        for _ in 0..intervals {
            regime.observe([seen.clone(), Seen::default()].iter(), load);
        }
        regime.caps()
    }

    #[test]
    fn misses_that_last_though_there_is_room_lead_to_the_other_way() {
        let mut regime = Regime::new();
        assert_eq!(observe(&mut regime, 30, 0.5, 3), Caps::Generous);
        assert_eq!(observe(&mut regime, 30, 0.5, 1), Caps::Fitting);
        assert_eq!(observe(&mut regime, 0, 0.5, 100), Caps::Fitting);
    }

    #[test]
    fn overload_a_few_misses_and_a_bad_moment_do_not() {
        for (missed, load) in [(30, 0.95), (15, 0.5)] {
            assert_eq!(observe(&mut Regime::new(), missed, load, 9), Caps::Generous);
        }
        let mut regime = Regime::new();
        for _ in 0..9 {
            observe(&mut regime, 90, 0.5, 3);
            assert_eq!(observe(&mut regime, 1, 0.5, 1), Caps::Generous);
        }
        let seen = Seen { arrived: 10, refused: 10, ..Seen::default() };
        (0..9).for_each(|_| regime.observe([seen.clone()].iter(), 0.5));
        assert_eq!(regime.caps(), Caps::Generous, "too few to say anything");
    }

    #[test]
    fn the_better_way_is_kept() {
        let mut regime = Regime::new();
        observe(&mut regime, 30, 0.5, 4);
        assert_eq!(observe(&mut regime, 60, 0.5, 4), Caps::Generous);
        assert_eq!(observe(&mut regime, 30, 0.5, 100), Caps::Generous);
        let mut regime = Regime::new();
        observe(&mut regime, 60, 0.5, 4);
        assert_eq!(observe(&mut regime, 30, 0.5, 100), Caps::Fitting);
    }
}
