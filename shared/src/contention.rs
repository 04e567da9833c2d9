//! The contention model: it computes how workers that execute at the same time slow each other down.
//! Kernels that may use the same SMs take turns.
//!
//! A share does not reserve SMs. If no other worker may use a worker's SMs, the worker is nearly as
//! fast as alone. On SMs that others may use too, each of its kernels waits for one kernel of each
//! other worker, in proportion to the SMs that this kernel fills. A model with many short kernels
//! therefore loses most beside a model with few long ones. A batch never takes longer than it would
//! take alone on the SMs that no other worker uses.
//!
//! The following rules use these symbols: `t(b, s)` is the time of a batch of `b` rows alone on `s` of
//! the GPU's `G` SMs, `w(b)` is its least work in SM·s, and `k` is its number of kernels.
//!
//! * Another worker's **turn** on its `s` SMs is `w(b) / (s · k)`: the duration of a kernel times the
//!   fraction of those SMs that it fills.
//! * A batch takes `t(b, s) + k · c · Σ p · turn`, or `t(b, f)` if that is less. `f` is the number of
//!   free SMs. `p` is the fraction of the worker's own SMs on which it meets the other worker. `c` is
//!   1, plus `CROWD` for each worker beyond the first that it meets, where it meets `Σ p` workers.
//! * MPS has two client priorities. A kernel of normal priority waits for a kernel below normal only
//!   until the running thread blocks end, for at most `BLOCK_S`. A worker below normal gets the time
//!   that workers of normal priority leave: its batch takes `1 / (1 - Σ p · LEADS · w / (s · T))` times
//!   as long, at most `LONGEST_STRETCH` times. `T` is the whole time of the other worker's batch. `c`
//!   counts only workers of the same priority.
//! * Memory bandwidth, caches and power are not divided. A batch takes `ELSEWHERE` longer, times the
//!   fraction of the GPU on which others execute outside its SMs.
//! * For partitions, `p` is known. Under an MPS percentage only the number of SMs is known: workers
//!   avoid each other if there is room, and otherwise are everywhere. Then `p` is the fraction of the
//!   worker's own SMs that are not free, times the other worker's fraction of the GPU.
//!
//! The constants fit measurements on an H200: two, three and five of ten models without idle time, in
//! batches of 1 to 32 rows on the whole GPU, halves, thirds and fifths, with one and with two client
//! priorities. See docs/development/measurements.md, *Contention*.

use std::cmp::Ordering;
use std::time::Duration;

use crate::groups::{Division, Groups};
use crate::profile::Execution;
use crate::units::Sms;

/// The increase of a batch's time while others execute on all other SMs, as a fraction of the time.
/// Fitted to the measurements named above.
const ELSEWHERE: f64 = 0.2;

/// The increase of each turn for each further worker on the same SMs, as a fraction of the turn. Fitted
/// to the measurements named above.
const CROWD: f64 = 0.09;

/// The longest time that a kernel waits for a worker below its own client priority, in s. Fitted to the
/// measurements named above.
const BLOCK_S: f64 = 5e-6;

/// The fraction of the SM time of a worker of normal priority that workers below normal cannot use.
/// Fitted to the measurements named above.
const LEADS: f64 = 0.93;

/// The largest factor by which workers of normal priority stretch a batch below normal. In the
/// measurements no batch starved.
const LONGEST_STRETCH: f64 = 10.0;

/// The longest time of a batch under contention, in s, so that it fits into a `Duration`.
const LONGEST_S: f64 = 1e6;

/// The priority of a worker as a client of MPS, with the values of `CUDA_MPS_CLIENT_PRIORITY`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ClientPriority {
    /// The normal priority.
    Normal = 0,
    /// The priority below normal.
    Below = 1,
}

impl ClientPriority {
    /// Returns the client priority of the workers of a model with this priority. It is normal for
    /// priority 1, the highest, and below normal for all others.
    pub const fn of(model: u32) -> Self {
        if model > 1 { Self::Below } else { Self::Normal }
    }
}

/// A worker that executes on a GPU, and the part of the GPU that it occupies.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Occupant {
    /// The number of SMs that the worker may use.
    pub sms: Sms,
    /// The groups of its partition, or [`Groups::NONE`] under an MPS percentage, which only limits the
    /// number of SMs.
    pub groups: Groups,
    /// The client priority of the worker.
    pub priority: ClientPriority,
    /// The time that each kernel of another worker waits for this worker, in s.
    pub turn: f32,
    /// The number of kernels of its current batch.
    pub kernels: f32,
    /// The time of that batch alone on these SMs, in s.
    pub alone: f32,
}

impl Occupant {
    /// Returns a worker of normal priority that is idle, under an MPS percentage for this number of
    /// SMs.
    pub const fn anywhere(sms: Sms) -> Self {
        let priority = ClientPriority::Normal;
        Self { sms, groups: Groups::NONE, priority, turn: 0.0, kernels: 0.0, alone: 0.0 }
    }

    /// Returns the same worker with this client priority.
    #[must_use]
    pub const fn with_priority(self, priority: ClientPriority) -> Self {
        Self { priority, ..self }
    }

    /// Returns the same worker while it executes a batch of `rows` rows.
    #[must_use]
    pub fn executing(self, execution: &Execution, rows: u32) -> Self {
        let sms = f64::from(self.sms.0.max(1));
        let (kernels, alone) = (execution.kernels(), execution.time(rows, sms).as_secs_f32());
        let turn = execution.work(rows) / (sms * kernels);
        Self { turn: turn as f32, kernels: kernels as f32, alone, ..self }
    }

    /// Returns the same worker if it executes for this fraction of the time.
    #[must_use]
    pub fn busy(self, part: f64) -> Self {
        Self { turn: self.turn * part as f32, ..self }
    }

    /// Returns the time that a kernel of this worker waits for one of another worker on the same SMs,
    /// in s.
    fn waits_for(self, other: Self) -> f64 {
        match self.priority.cmp(&other.priority) {
            Ordering::Less => f64::from(other.turn).min(BLOCK_S),
            Ordering::Equal => f64::from(other.turn),
            Ordering::Greater => 0.0,
        }
    }
}

/// A GPU that several workers share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedGpu {
    /// The number of SMs.
    pub sms: Sms,
    /// The division of the SMs into groups, if the GPU has partitions.
    pub division: Option<Division>,
}

impl SharedGpu {
    /// Returns a GPU with the division that CUDA makes of this number of SMs.
    pub fn new(sms: Sms) -> Self {
        Self { sms, division: Division::of(sms) }
    }

    /// Returns an idle worker in a partition. If the GPU has no partitions, the worker may use all SMs.
    pub fn occupant(&self, groups: Groups) -> Occupant {
        match &self.division {
            Some(division) => Occupant { groups, ..Occupant::anywhere(division.sms(groups)) },
            None => Occupant::anywhere(self.sms),
        }
    }

    fn sms_of(&self, groups: Groups) -> f64 {
        self.division.as_ref().map_or(0.0, |division| f64::from(division.sms(groups).0))
    }

    /// Returns the number of SMs of `own` that the others leave free. Others without a partition use
    /// SMs outside `own` first.
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

    /// Returns the time of a batch of `rows` rows of `own` while these others execute.
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

    /// Returns the time of the batch of `own` if its kernels take turns with those of the others, in s.
    fn in_turns(&self, own: Occupant, others: impl Iterator<Item = Occupant> + Clone) -> f64 {
        let free = self.free(own, others.clone());
        let met = |other: Occupant| self.met(own, other, free);
        let turns: f64 = others.clone().map(|other| met(other) * own.waits_for(other)).sum();
        let peers = others.filter(|other| other.priority == own.priority);
        let crowd = 1.0 + CROWD * (peers.map(met).sum::<f64>() - 1.0).max(0.0);
        f64::from(own.alone) + f64::from(own.kernels) * crowd * turns
    }

    /// Returns the fraction of the time that workers of a higher priority leave to `own`.
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

    /// Returns the fraction of its own SMs on which `own` meets the other worker, if `free` of them are
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

    /// Returns the fraction of the GPU on which the other worker executes outside the SMs of `own`, if
    /// `free` of those are free.
    fn beside(&self, own: Occupant, other: Occupant, free: f64) -> f64 {
        let (sms, all) = (f64::from(own.sms.0), f64::from(self.sms.0.max(1)));
        match (own.groups, other.groups) {
            (Groups::NONE, _) | (_, Groups::NONE) => {
                // Workers without partitions are all outside if there is room, and otherwise
                // everywhere.
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

    /// Returns the times of a model whose row takes `ms` on 64 SMs or more, and twice that on 32. The
    /// time is proportional to the number of rows.
    fn profile(ms: f64) -> Execution {
        Execution::new(vec![Sms(32), Sms(64)], vec![ExecutionRow { batch: 1, ms: vec![2.0 * ms, ms] }])
            .unwrap()
    }

    /// Returns the time of one row of 1 ms on `own` beside others with batches of these numbers of
    /// rows.
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
    fn workers_on_separate_sms_slow_each_other_through_memory_bandwidth() {
        assert_eq!(beside(whole(), &[]), MS);
        let beside_half = MS.mul_f64(1.1);
        assert_eq!(beside(on(0..8), &[(9, on(8..16))]), beside_half);
        assert_eq!(beside(anywhere(64), &[(9, anywhere(32)), (9, anywhere(32))]), beside_half);
        assert_eq!(
            beside(on(0..8), &[(9, anywhere(64))]),
            beside_half,
            "a worker without a partition uses the other SMs"
        );
        assert_eq!(beside(on(0..8), &[(0, on(8..16))]), beside_half);
        assert_eq!(gpu().time(&profile(1.0), 1, on(0..8), std::iter::once(on(8..16))), MS, "it is idle");
    }

    #[test]
    fn on_the_same_sms_each_kernel_waits_for_one_of_the_others() {
        // One row of the other worker fills half of the GPU, so its turn is half a kernel. Eight rows
        // make four kernels.
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
        let below = whole().with_priority(ClientPriority::Below);
        // With 200 kernels, a turn of the other worker's eight rows is 20 µs.
        let normal_beside_below = beside(whole(), &[(8, below)]);
        assert_eq!(normal_beside_below, MS + Duration::from_micros(200 * 5));
        assert_eq!(beside(below, &[(8, below)]), beside(whole(), &[(8, whole())]), "peers take turns");
        // The other worker's row takes 1 ms on half of the SMs, and waits 0.5 ms for ours.
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
    fn a_smaller_share_does_not_help_beside_a_whole_gpu() {
        assert!(beside(on(0..4), &[(8, whole())]) > 6 * MS);
        assert!(beside(anywhere(32), &[(8, anywhere(128))]) > 6 * MS);
    }

    #[test]
    fn sms_that_nobody_else_uses_bound_the_time() {
        assert_eq!(beside(whole(), &[(8, on(0..8))]), MS, "64 are free");
        assert_eq!(beside(whole(), &[(8, on(0..12))]), 2 * MS, "32 are free");
        assert_eq!(beside(anywhere(128), &[(8, anywhere(96))]), 2 * MS, "32 are free");
        assert_eq!(beside(on(0..8), &[(32, on(4..16))]), (2 * MS).mul_f64(1.1), "32 are free");
    }

    #[test]
    fn waiting_is_in_proportion_to_the_common_sms() {
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
    fn a_gpu_without_groups_has_only_the_whole() {
        let gpu = SharedGpu::new(Sms(8));
        assert_eq!((gpu.division.is_none(), gpu.occupant(Groups::WHOLE)), (true, anywhere(8)));
    }
}
