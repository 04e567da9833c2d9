//! How workers that execute at the same time slow each other down: kernels take turns where they
//! may use the same SMs.
//!
//! A share is no reservation. If no other worker may use a worker's SMs, it is nearly as fast as
//! alone. On SMs that others may use, too, each of its kernels waits for one kernel of each other
//! worker, as far as that kernel fills its SMs. So a model of many short kernels loses most beside
//! one of few long ones. A batch never takes longer than on the SMs alone that no other worker
//! uses.
//!
//! With `t(b, s)` the time of a batch of `b` rows on `s` of the GPU's `G` SMs, alone, `w(b)` its
//! least work in SM·s, and `k` its kernels,
//!
//! * another worker's **turn** on its `s` SMs is `w(b) / (s · k)`: the length of a kernel times the
//!   part of those SMs that it fills;
//! * a batch takes `t(b, s) + k · c · Σ p · turn`, or `t(b, f)` where that is less: `f` SMs are
//!   free, `p` is the part of its own SMs on which it meets the other worker, and `c` is 1 plus
//!   [`CROWD`] for each worker beyond the first that it meets, `Σ p` in all;
//! * MPS knows two client priorities. A kernel of a worker of normal priority waits for one of a
//!   worker below only until blocks of threads end: for [`BLOCK_S`] at most. A worker below has the
//!   time that those of normal priority leave: its batch takes `1 / (1 - Σ p · LEADS · w / (s · T))`
//!   times as long, where such a worker's batch takes `T` in all, and at most [`LONGEST_STRETCH`]
//!   times. The crowd counts workers of the same priority;
//! * memory bandwidth, caches and power are not divided: a batch takes [`ELSEWHERE`] longer for the
//!   part of the GPU on which others execute beside it;
//! * for partitions `p` is known. Where SMs are only counted, as under a percentage, workers avoid
//!   each other as long as there is room, and then are everywhere: `p` is the part of its own SMs
//!   that are not free, times the other worker's part of the GPU.
//!
//! Measured on an H200 with two, three and five of ten models, each never at rest, in batches of 1
//! to 32 rows on the whole GPU, halves, thirds and fifths, with one and two client priorities:
//! docs/measurements.md, *Contention*.

use std::cmp::Ordering;
use std::time::Duration;

use crate::groups::{Division, Groups};
use crate::profile::Execution;
use crate::units::Sms;

/// How much longer a batch takes while others execute on all other SMs, as a part of its time:
/// fitted to the measurements named above.
const ELSEWHERE: f64 = 0.2;

/// How much longer each turn is for each further worker on the same SMs, as a part of it: fitted to
/// the measurements named above.
const CROWD: f64 = 0.09;

/// The longest time for which a kernel waits for a worker below its own client priority, in s:
/// fitted to the measurements named above.
const BLOCK_S: f64 = 5e-6;

/// The part of the SM time of a worker of normal priority that those below do without: fitted to the
/// measurements named above.
const LEADS: f64 = 0.93;

/// How many times as long a batch takes beside workers of normal priority, at most: the measured
/// ones did not starve.
const LONGEST_STRETCH: f64 = 10.0;

/// In seconds.
const LONGEST_S: f64 = 1e6;

/// The priority of a worker as a client of MPS, as `CUDA_MPS_CLIENT_PRIORITY` has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ClientPriority {
    Normal = 0,
    Below = 1,
}

impl ClientPriority {
    /// Returns the client priority of the workers of a model. Only models of priority 1 have the
    /// normal one.
    pub const fn of(model: u32) -> Self {
        if model > 1 { Self::Below } else { Self::Normal }
    }
}

/// What a worker occupies of a GPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Occupant {
    pub sms: Sms,
    /// None where the SMs are only counted.
    pub groups: Groups,
    pub priority: ClientPriority,
    /// How long each kernel of another worker waits for this worker, in s.
    pub turn: f32,
    /// The kernels of the batch that it executes.
    pub kernels: f32,
    /// How long that batch takes on these SMs alone, in s.
    pub alone: f32,
}

impl Occupant {
    /// Returns a worker of normal priority that keeps no other waiting.
    pub const fn anywhere(sms: Sms) -> Self {
        let priority = ClientPriority::Normal;
        Self { sms, groups: Groups::NONE, priority, turn: 0.0, kernels: 0.0, alone: 0.0 }
    }

    /// Returns the same worker with this client priority.
    #[must_use]
    pub const fn with(self, priority: ClientPriority) -> Self {
        Self { priority, ..self }
    }

    /// Returns the same worker, while it executes a batch of `rows` rows.
    #[must_use]
    pub fn executing(self, execution: &Execution, rows: u32) -> Self {
        let sms = f64::from(self.sms.0.max(1));
        let (kernels, alone) = (execution.kernels(), execution.time(rows, sms).as_secs_f32());
        let turn = execution.work(rows) / (sms * kernels);
        Self { turn: turn as f32, kernels: kernels as f32, alone, ..self }
    }

    /// Returns the same worker if it executes for this part of the time.
    #[must_use]
    pub fn busy(self, part: f64) -> Self {
        Self { turn: self.turn * part as f32, ..self }
    }

    /// Returns how long a kernel of this worker waits for one of another on the same SMs, in s.
    fn waits_for(self, other: Self) -> f64 {
        match self.priority.cmp(&other.priority) {
            Ordering::Less => f64::from(other.turn).min(BLOCK_S),
            Ordering::Equal => f64::from(other.turn),
            Ordering::Greater => 0.0,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedGpu {
    pub sms: Sms,
    /// How the SMs divide into groups, if they do.
    pub division: Option<Division>,
}

impl SharedGpu {
    /// A GPU that divides as CUDA would divide it.
    pub fn new(sms: Sms) -> Self {
        Self { sms, division: Division::of(sms) }
    }

    /// If the GPU does not divide, the partition is all SMs, wherever they are.
    pub fn occupant(&self, groups: Groups) -> Occupant {
        match &self.division {
            Some(division) => Occupant { groups, ..Occupant::anywhere(division.sms(groups)) },
            None => Occupant::anywhere(self.sms),
        }
    }

    fn sms_of(&self, groups: Groups) -> f64 {
        self.division.as_ref().map_or(0.0, |division| f64::from(division.sms(groups).0))
    }

    /// The SMs of `own` that the others leave free. Others that are only counted go first where
    /// there is room.
    pub fn free(&self, own: Occupant, others: impl Iterator<Item = Occupant>) -> f64 {
        let (mut taken, mut counted) = (Groups::NONE, 0.0);
        for other in others {
            taken = taken.union(other.groups);
            counted += if other.groups == Groups::NONE { f64::from(other.sms.0) } else { 0.0 };
        }
        let (all, sms) = (f64::from(self.sms.0), f64::from(own.sms.0));
        let taken_sms = self.sms_of(taken);
        let room = match own.groups {
            Groups::NONE => sms.min(all - taken_sms),
            groups => self.sms_of(groups.without(taken)),
        };
        let elsewhere = all - taken_sms - room;
        (room - (counted - elsewhere).max(0.0)).max(0.0)
    }

    /// Returns how long a batch takes on `own` SMs beside these others.
    pub fn time(
        &self,
        execution: &Execution,
        rows: u32,
        own: Occupant,
        others: impl Iterator<Item = Occupant> + Clone,
    ) -> Duration {
        let own = own.executing(execution, rows);
        let free = self.free(own, others.clone());
        let others = others.filter(|other| other.turn > 0.0);
        let stretched = self.in_turns(own, others.clone()) / self.left(own, others.clone());
        let stretched = Duration::from_secs_f64(stretched.min(LONGEST_S));
        let met = if free >= 1.0 { stretched.min(execution.time(rows, free)) } else { stretched };
        let elsewhere = others.map(|other| self.beside(own, other, free)).sum::<f64>().min(1.0);
        met.mul_f64(1.0 + ELSEWHERE * elsewhere)
    }

    /// Returns how long the batch of `own` takes if its kernels take turns with those of the others,
    /// in s.
    fn in_turns(&self, own: Occupant, others: impl Iterator<Item = Occupant> + Clone) -> f64 {
        let free = self.free(own, others.clone());
        let met = |other: Occupant| self.met(own, other, free);
        let turns: f64 = others.clone().map(|other| met(other) * own.waits_for(other)).sum();
        let peers = others.filter(|other| other.priority == own.priority);
        let crowd = 1.0 + CROWD * (peers.map(met).sum::<f64>() - 1.0).max(0.0);
        f64::from(own.alone) + f64::from(own.kernels) * crowd * turns
    }

    /// Returns the part of the time that workers of a higher priority leave to `own`.
    fn left(&self, own: Occupant, others: impl Iterator<Item = Occupant> + Clone) -> f64 {
        let free = self.free(own, others.clone());
        let above = others.clone().enumerate().filter(|(_, other)| other.priority < own.priority);
        let taken = above.map(|(at, other)| {
            let beside = others.clone().enumerate().filter(move |(beside, _)| *beside != at);
            let took = self.in_turns(other, beside.map(|(_, other)| other).chain(std::iter::once(own)));
            let filled = f64::from(other.turn) * f64::from(other.kernels) / took.max(f64::MIN_POSITIVE);
            self.met(own, other, free) * LEADS * filled
        });
        (1.0 - taken.sum::<f64>()).max(1.0 / LONGEST_STRETCH)
    }

    /// Returns the part of its own SMs on which `own` meets the other worker, if `free` of them are
    /// free.
    fn met(&self, own: Occupant, other: Occupant, free: f64) -> f64 {
        let (sms, all) = (f64::from(own.sms.0), f64::from(self.sms.0.max(1)));
        match (own.groups, other.groups) {
            (Groups::NONE, _) | (_, Groups::NONE) => {
                (sms - free) / sms.max(1.0) * f64::from(other.sms.0) / all
            }
            (one, other) => self.sms_of(one.common(other)) / sms,
        }
    }

    /// Returns the part of the GPU on which the other worker executes beside the SMs of `own`, if
    /// `free` of those are free.
    fn beside(&self, own: Occupant, other: Occupant, free: f64) -> f64 {
        let (sms, all) = (f64::from(own.sms.0), f64::from(self.sms.0.max(1)));
        match (own.groups, other.groups) {
            (Groups::NONE, _) | (_, Groups::NONE) => {
                // Workers that are only counted are all elsewhere if there is room, and else everywhere.
                let outside = if free < sms { (all - sms) / all } else { 1.0 };
                outside * f64::from(other.sms.0) / all
            }
            (one, other) => self.sms_of(other.without(one)) / all,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::ExecutionRow;

    const MS: Duration = Duration::from_millis(1);

    fn gpu() -> SharedGpu {
        SharedGpu::new(Sms(128))
    }

    /// One row takes `ms` from 64 SMs on, and twice that on 32; rows come one after the other.
    fn profile(ms: f64) -> Execution {
        Execution::new(vec![Sms(32), Sms(64)], vec![ExecutionRow { batch: 1, ms: vec![2.0 * ms, ms] }])
            .unwrap()
    }

    /// The time of one row of 1 ms on `own` beside batches of so many rows on these.
    fn beside(own: Occupant, others: &[(u32, Occupant)]) -> Duration {
        let executing = |&(rows, other): &(u32, Occupant)| other.executing(&profile(1.0), rows);
        gpu().time(&profile(1.0), 1, own, others.iter().map(executing))
    }

    fn anywhere(sms: u32) -> Occupant {
        Occupant::anywhere(Sms(sms))
    }

    fn on(groups: std::ops::Range<usize>) -> Occupant {
        gpu().occupant(groups.collect())
    }

    fn whole() -> Occupant {
        gpu().occupant(Groups::WHOLE)
    }

    #[test]
    fn shares_that_fit_slow_each_other_by_what_they_have_elsewhere() {
        assert_eq!(beside(whole(), &[]), MS);
        let beside_half = MS.mul_f64(1.1);
        assert_eq!(beside(on(0..8), &[(9, on(8..16))]), beside_half);
        assert_eq!(beside(anywhere(64), &[(9, anywhere(32)), (9, anywhere(32))]), beside_half);
        assert_eq!(
            beside(on(0..8), &[(9, anywhere(64))]),
            beside_half,
            "what is only counted goes where there is room"
        );
        assert_eq!(beside(on(0..8), &[(0, on(8..16))]), beside_half);
        assert_eq!(gpu().time(&profile(1.0), 1, on(0..8), std::iter::once(on(8..16))), MS, "it is idle");
    }

    #[test]
    fn on_the_same_sms_each_kernel_waits_for_one_of_the_others() {
        // One row of the other does half of the GPU's work, so its turn is half a kernel; eight
        // rows make four.
        for own in [whole(), anywhere(128)] {
            assert_eq!(beside(own, &[(1, own)]), MS * 3 / 2);
            assert_eq!(beside(own, &[(8, own)]), 5 * MS);
            let (waits, crowd) = (4.5, 1.09);
            let both = beside(own, &[(8, own), (1, own)]).as_secs_f64() * 1e3;
            assert!((both - 1.0 - waits * crowd).abs() < 1e-6, "{both}");
        }
    }

    #[test]
    fn a_batch_waits_as_often_as_it_has_kernels_whatever_its_rows() {
        let others = whole().executing(&profile(1.0), 1);
        let time = |execution: &Execution, rows| {
            gpu().time(execution, rows, whole(), std::iter::once(others)).as_secs_f64() * 1e3
        };
        assert!((time(&profile(1.0), 16) - 16.5).abs() < 1e-5);
        let many_short = profile(1.0).with_kernels(800);
        assert!((time(&many_short, 1) - 3.0).abs() < 1e-6, "four times the usual 200");
        let few_long = whole().executing(&profile(1.0).with_kernels(50), 1);
        let beside_few = gpu().time(&profile(1.0), 1, whole(), std::iter::once(few_long));
        assert!((beside_few.as_secs_f64() * 1e3 - 3.0).abs() < 1e-6);
    }

    #[test]
    fn a_worker_of_normal_priority_hardly_waits_for_those_below_and_they_run_where_it_leaves_room() {
        let below = whole().with(ClientPriority::Below);
        // 200 kernels, so a turn of the other's eight rows is 20 us.
        let normal_beside_below = beside(whole(), &[(8, below)]);
        assert_eq!(normal_beside_below, MS + Duration::from_micros(200 * 5));
        assert_eq!(beside(below, &[(8, below)]), beside(whole(), &[(8, whole())]), "peers take turns");
        // The other's row takes 1 ms of half of the SMs and 1 ms more of waiting for ours.
        let below_beside_normal = beside(below, &[(1, whole())]).as_secs_f64() * 1e3;
        assert!((below_beside_normal - 1.0 / (1.0 - 0.93 * 0.5 / 1.5)).abs() < 1e-3, "{below_beside_normal}");
        let full = Execution::new(vec![Sms(128)], vec![ExecutionRow { batch: 1, ms: vec![1e3] }]).unwrap();
        let full = whole().executing(&full.with_kernels(100), 1);
        assert_eq!(gpu().time(&profile(1.0), 1, below, std::iter::once(full)), 10 * MS, "it does not starve");
        assert_eq!(beside(below, &[(8, on(0..8))]), MS, "64 are free");
        let turn =
            Duration::from_secs_f64(f64::from(below.executing(&profile(1.0).with_kernels(500), 1).turn));
        assert!(turn < Duration::from_micros(5));
        let short = below.executing(&profile(1.0).with_kernels(500), 1);
        let time = gpu().time(&profile(1.0), 1, whole(), std::iter::once(short));
        assert_eq!(time, MS + turn * 200, "a turn that is shorter counts as it is");
    }

    #[test]
    fn a_smaller_share_of_ones_own_does_not_help() {
        assert!(beside(on(0..4), &[(8, whole())]) > 6 * MS);
        assert!(beside(anywhere(32), &[(8, anywhere(128))]) > 6 * MS);
    }

    #[test]
    fn sms_that_nobody_else_uses_are_always_there() {
        assert_eq!(beside(whole(), &[(8, on(0..8))]), MS, "64 are free");
        assert_eq!(beside(whole(), &[(8, on(0..12))]), 2 * MS, "32 are free");
        assert_eq!(beside(anywhere(128), &[(8, anywhere(96))]), 2 * MS, "32 are free");
        assert_eq!(beside(on(0..8), &[(32, on(4..16))]), (2 * MS).mul_f64(1.1), "32 are free");
    }

    #[test]
    fn who_meets_another_on_a_part_of_its_sms_waits_in_that_part_of_the_cases() {
        let (half, all) = (beside(on(0..8), &[(1, on(4..12))]), beside(on(0..8), &[(1, on(0..8))]));
        assert_eq!((half.div_f64(1.05) - MS) * 2, all - MS);
        // Ten workers with a quarter each are met two and a half times, not ten times.
        let many = beside(anywhere(32), &[(1, anywhere(32)); 10]);
        let turn = 2.0;
        assert!(
            (many.as_secs_f64() * 1e3 / 1.2 - 2.0 - 2.5 * turn * (1.0 + 0.09 * 1.5)).abs() < 1e-6,
            "{many:?}"
        );
    }

    #[test]
    fn a_gpu_that_does_not_divide_has_one_way_to_be_shared() {
        let gpu = SharedGpu::new(Sms(8));
        assert_eq!((gpu.division.is_none(), gpu.occupant(Groups::WHOLE)), (true, anywhere(8)));
    }
}
