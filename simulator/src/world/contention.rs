//! What is left of a cap beside others that execute: the rule of a simulated world in which kernels take turns, as on a real GPU.
//!
//! A cap is no reservation. While the caps of those who execute fit onto the GPU together, nobody is slowed down. When
//! they do not, each kernel of one waits for a **turn** of each of the others: about one of their kernels, as far as those
//! fill the GPU. So long kernels of large batches keep short ones waiting. But SMs that nobody else may use are always free:
//! what protects a model is the caps of the others, not its own.
//!
//! How many kernels a batch has is not known, but that they are short for one row on the whole GPU, much the same for all
//! models, and as much longer as the batch takes longer. With `t(b, c)` the execution time, `G` the GPU's SMs and `w` the least work
//! of a batch in SM·s, a batch
//!
//! * has kernels of length `k = t(b, c) / t(1, G)`, and fills the part `f = w / (t(b, c) · G)` of the GPU;
//! * makes the others wait for `k · min(1, f · max(1, 2.5 · f))` with each of their kernels, so that nobody
//!   costs the others less than its work;
//! * takes `t(b, c) + t(1, G) · p · (the others' turns)`, or less if it takes less on the SMs that are free. Here `p` is the larger of
//!   the part of the others' caps that does not fit beside its own, and the part of the GPU that one of them covers, on average.
//!
//! The rule and its one factor come from what ResNet-50 met on an H200 beside a VGG-19 and a BERT base, each at several caps:
//! docs/measurements/contention.md.

use std::time::Duration;

use shadowslice_shared::profile::Execution;
use shadowslice_shared::units::Sms;

/// How fast the others' waits come to whole kernels as a batch fills more of the GPU.
const FILLING: f64 = 2.5;

/// Turns are counted in this part of the shortest kernel.
const UNIT: f64 = 64.0;

/// Nobody waits for longer than this, in seconds.
const LONGEST_S: f64 = 1e6;

/// Steps of a turn's length to an octave, so that neighbours hear of a new one only when it matters.
const STEPS: f64 = 4.0;

/// Who executes: the SMs that it may use, and how long it keeps others waiting where they do not all fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Occupant {
    /// Its cap.
    pub(super) cap: Sms,
    /// The length of its turns: steps of a quarter octave, from one unit.
    turn: u8,
}

impl Occupant {
    /// Nobody executes.
    pub(super) const NOBODY: Self = Self { cap: Sms(0), turn: 0 };

    /// A worker with that cap whose turns do not matter.
    pub(super) const fn with_cap(cap: Sms) -> Self {
        Self { cap, turn: 0 }
    }

    /// A worker with that cap on a GPU of `gpu` SMs, that executes a batch of so many rows.
    pub(super) fn of(execution: &Execution, rows: u32, cap: Sms, gpu: Sms) -> Self {
        let (sms, whole) = (f64::from(cap.0), f64::from(gpu.0.max(1)));
        let time = |rows, sms| execution.time(rows, sms).as_secs_f64().max(1e-9);
        let alone = time(rows, sms);
        let filled = execution.work(rows).min(sms * alone) / (alone * whole);
        let kernel = alone / time(1, whole);
        let turn = kernel * (filled * (FILLING * filled).max(1.0)).min(1.0);
        let steps = (STEPS * (UNIT * turn).max(1.0).log2()).ceil();
        Self { cap, turn: steps.min(f64::from(u8::MAX)) as u8 }
    }

    /// How long it keeps others waiting, in units.
    fn turn(self) -> u64 {
        // The largest comes to less than 2^64.
        (f64::from(self.turn) / STEPS).exp2().round() as u64
    }
}

/// All who execute on a GPU, summed.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct Crowd {
    /// Their caps, in SMs.
    pub(super) caps: u64,
    /// The squares of their caps, summed.
    squares: u64,
    /// Their turns, in units.
    turns: u64,
}

impl Crowd {
    /// One more; nobody changes nothing.
    #[must_use]
    pub(super) fn with(self, one: Occupant) -> Self {
        let cap = u64::from(one.cap.0);
        if cap == 0 {
            return self;
        }
        let Self { caps, squares, turns } = self;
        Self { caps: caps + cap, squares: squares + cap * cap, turns: turns.saturating_add(one.turn()) }
    }

    /// One less, who is among them.
    #[must_use]
    pub(super) fn without(self, one: Occupant) -> Self {
        let cap = u64::from(one.cap.0);
        if cap == 0 {
            return self;
        }
        let Self { caps, squares, turns } = self;
        Self {
            caps: caps.saturating_sub(cap),
            squares: squares.saturating_sub(cap * cap),
            turns: turns.saturating_sub(one.turn()),
        }
    }

    /// Whether nobody slows down anybody on a GPU of so many SMs.
    pub(super) fn fits(self, gpu: Sms) -> bool {
        self.caps <= u64::from(gpu.0)
    }

    /// Of their turns, how many somebody waits for who has `cap` besides: those who are many and have little each
    /// run side by side as far as they fit, while somebody who has all of the GPU is always in the way.
    fn blocked(self, cap: Sms, gpu: Sms) -> f64 {
        let (caps, gpu) = (self.caps.max(1) as f64, f64::from(gpu.0.max(1)));
        let too_many = (caps + f64::from(cap.0) - gpu) / caps;
        let covered = self.squares as f64 / (caps * gpu);
        too_many.max(covered).clamp(0.0, 1.0)
    }

    /// How long a batch of so many rows takes on `cap` SMs of `gpu`, beside these **others**.
    pub(super) fn time(self, execution: &Execution, rows: u32, cap: Sms, gpu: Sms) -> Duration {
        let alone = execution.time(rows, f64::from(cap.0));
        if self.caps + u64::from(cap.0) <= u64::from(gpu.0) {
            return alone;
        }
        let kernels = execution.time(1, f64::from(gpu.0)).as_secs_f64();
        let waits = self.blocked(cap, gpu) * kernels * self.turns as f64 / UNIT;
        let in_turns = alone + Duration::from_secs_f64(waits.min(LONGEST_S));
        match u64::from(gpu.0).checked_sub(self.caps) {
            Some(free @ 1..) => in_turns.min(execution.time(rows, free as f64)),
            _ => in_turns,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowslice_shared::profile::Row;

    const GPU: Sms = Sms(132);
    const MS: Duration = Duration::from_millis(1);

    /// One row takes `ms` from 66 SMs on, and twice that on 33.
    fn profile(ms: f64) -> Execution {
        Execution::new(vec![Sms(33), Sms(66)], vec![Row { batch: 1, ms: vec![2.0 * ms, ms] }]).unwrap()
    }

    fn beside(others: &[(f64, u32)], cap: u32) -> Duration {
        let others = others.iter().map(|&(ms, cap)| Occupant::of(&profile(ms), 1, Sms(cap), GPU));
        others.fold(Crowd::default(), Crowd::with).time(&profile(1.0), 1, Sms(cap), GPU)
    }

    fn about(one: Duration, other: Duration) -> bool {
        one.abs_diff(other) < one / 10
    }

    #[test]
    fn caps_that_fit_slow_nobody() {
        assert_eq!(beside(&[], 132), MS);
        assert_eq!(beside(&[(9.0, 66)], 66), MS);
        assert_eq!(beside(&[(9.0, 33), (9.0, 33)], 66), MS);
    }

    #[test]
    fn who_does_not_fit_waits_with_each_kernel_for_everybody_s() {
        // Of half the GPU, 0.5 · 1.25 of a kernel each: as long as one's own, whatever the batch takes in all.
        assert!(about(beside(&[(1.0, 132)], 132), MS * 13 / 8));
        assert!(about(beside(&[(8.0, 132)], 132), MS * 13 / 8));
        assert!(about(beside(&[(8.0, 132), (8.0, 132)], 132), MS * 9 / 4));
        assert!(about(beside(&[(8.0, 132)], 33), MS * 21 / 8), "a smaller cap of one's own does not help");
    }

    #[test]
    fn long_kernels_keep_short_ones_waiting() {
        let hog = Occupant::of(&profile(1.0), 8, Sms(132), GPU);
        let beside_hog = Crowd::default().with(hog).time(&profile(1.0), 1, Sms(132), GPU);
        assert!(about(beside_hog, 6 * MS), "{beside_hog:?}");
        let small = Occupant::of(&profile(1.0), 1, Sms(132), GPU);
        let beside_small = Crowd::default().with(small).time(&profile(1.0), 8, Sms(132), GPU);
        assert!(about(beside_small, MS * 69 / 8), "{beside_small:?}");
    }

    #[test]
    fn a_cap_on_the_others_protects() {
        assert_eq!(beside(&[(8.0, 66)], 132), MS, "66 SMs are free");
        assert!(about(beside(&[(8.0, 99)], 132), MS * 13 / 8));
        let hog = Occupant::of(&profile(1.0), 32, Sms(99), GPU);
        assert_eq!(Crowd::default().with(hog).time(&profile(1.0), 1, Sms(132), GPU), 2 * MS, "33 are free");
    }

    #[test]
    fn who_leaves_leaves_nothing_behind_and_nobody_is_nothing() {
        let occupant = Occupant::of(&profile(3.0), 1, Sms(40), GPU);
        let crowd = Crowd::default().with(occupant);
        assert_eq!(crowd.with(Occupant::NOBODY), crowd);
        assert_eq!(crowd.without(occupant), Crowd::default());
    }
}
