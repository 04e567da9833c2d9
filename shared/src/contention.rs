//! The contention model, which estimates how much workers slow each other down if they execute at the
//! same time. Kernels that can use the same SMs take turns.
//!
//! A share does not reserve SMs. If no other worker can use a worker's SMs, the worker is nearly as
//! fast as it would be alone. If other workers can use the same SMs, each of the worker's kernels waits
//! for one kernel of each other worker. This wait is proportional to the fraction of the SMs that the
//! other kernel fills. Therefore a model with many short kernels slows down most when it runs next to a
//! model with few long kernels. A batch never takes longer than it would take alone on the SMs that no
//! other worker uses.
//!
//! The rules below use these symbols: `t(b, s)` is the time of a batch of `b` rows that runs alone on
//! `s` SMs. `w(b)` is the minimum work of this batch in SM·s. `k` is its number of kernels.
//!
//! * The **turn** of another worker on its `s` SMs is `w(b) / (s · k)`. This is the duration of one of
//!   its kernels, times the fraction of its SMs that the kernel fills.
//! * A batch takes the lesser of `t(b, s) + k · c · Σ p · turn` and `t(b, f)`. `f` is the number of
//!   free SMs. `p` is the fraction of the worker's own SMs that the other worker can also use. `Σ p` is
//!   therefore the mean number of other workers on each of these SMs. `c` is 1, plus `CROWD` times the
//!   excess of `Σ p` over 1.
//! * MPS has two client priorities. A kernel of normal priority waits for a kernel below normal only
//!   until the running thread blocks end, for at most `BLOCK_S`. A worker below normal gets the time
//!   that workers of normal priority do not use. Its batch takes `1 / (1 - Σ p · LEADS · w / (s · T))`
//!   times as long as without these workers, but at most `LONGEST_STRETCH` times as long. `T` is the
//!   total time of the other worker's batch. The factor `c` depends only on workers of the same
//!   priority.
//! * Workers on different SMs still share memory bandwidth, caches and power. A batch takes longer by
//!   the factor `1 + ELSEWHERE · e`. `e` is the fraction of the GPU that other workers use outside the
//!   batch's own SMs.
//! * For partitions, `p` is known. Under an MPS percentage, only the number of SMs is known. The
//!   contention model assumes that workers use different SMs if the GPU has enough SMs, and that they
//!   otherwise use SMs everywhere. In that case, `p` is the fraction of the worker's own SMs that are
//!   not free, times the fraction of the GPU that the other worker uses.
//!
//! The constants are fitted to measurements on an H200. In each measurement, two, three or five of ten
//! models ran without idle time, in batches of 1 to 32 rows. The models ran on the whole GPU, halves,
//! thirds and fifths, with one and with two client priorities. See docs/development/measurements.md,
//! *Contention*.

use std::cmp::Ordering;
use std::time::Duration;

use crate::groups::{Division, Groups};
use crate::profile::Execution;
use crate::units::Sms;

/// The relative increase of a batch's time by workers on other SMs. It is multiplied by the fraction of
/// the GPU that these workers use outside the batch's SMs. The value is fitted to the measurements that
/// the module's documentation describes.
const ELSEWHERE: f64 = 0.2;

/// The relative increase of every turn for each further worker on the same SMs. It is fitted to the
/// measurements that the module's documentation describes.
const CROWD: f64 = 0.09;

/// The maximum time for which a kernel waits for a worker with a lower client priority, in s. It is
/// fitted to the measurements that the module's documentation describes.
const BLOCK_S: f64 = 5e-6;

/// The fraction of a normal-priority worker's SM time that workers below normal priority cannot use.
/// The value is fitted to the measurements that the module's documentation describes.
const LEADS: f64 = 0.93;

/// The maximum slowdown of a batch of a worker below normal, caused by workers of normal priority. In
/// the measurements, no batch starved.
const LONGEST_STRETCH: f64 = 10.0;

/// The maximum time of a batch under contention, in s, so that the time fits into a `Duration`.
const LONGEST_S: f64 = 1e6;

/// The priority of a worker as an MPS client. The discriminants are the values of the environment
/// variable `CUDA_MPS_CLIENT_PRIORITY`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ClientPriority {
    /// The normal priority.
    Normal = 0,
    /// The priority below normal.
    Below = 1,
}

impl ClientPriority {
    /// Returns the client priority of the workers of a model with priority `model`. Priority 1, the
    /// highest, has the normal client priority. All other priorities have the client priority below
    /// normal.
    pub const fn of(model: u32) -> Self {
        if model > 1 { Self::Below } else { Self::Normal }
    }
}

/// A worker that executes on a GPU, and the part of the GPU that it occupies.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Occupant {
    /// The number of SMs that the worker is allowed to use.
    pub sms: Sms,
    /// The groups of the worker's partition. Under an MPS percentage, which limits only the number of
    /// SMs, this is [`Groups::NONE`].
    pub groups: Groups,
    /// The client priority of the worker.
    pub priority: ClientPriority,
    /// The time for which each kernel of another worker waits for this worker, in s.
    pub turn: f32,
    /// The number of kernels of the worker's current batch.
    pub kernels: f32,
    /// The time that the current batch would take alone on these SMs, in s.
    pub alone: f32,
}

impl Occupant {
    /// Returns an idle worker of normal priority with an MPS percentage that allows this number of SMs.
    pub const fn anywhere(sms: Sms) -> Self {
        let priority = ClientPriority::Normal;
        Self { sms, groups: Groups::NONE, priority, turn: 0.0, kernels: 0.0, alone: 0.0 }
    }

    /// Returns the same occupant with this client priority.
    #[must_use]
    pub const fn with_priority(self, priority: ClientPriority) -> Self {
        Self { priority, ..self }
    }

    /// Returns the same occupant while it executes a batch of `rows` rows.
    #[must_use]
    pub fn executing(self, execution: &Execution, rows: u32) -> Self {
        let sms = f64::from(self.sms.0.max(1));
        let (kernels, alone) = (execution.kernels(), execution.time(rows, sms).as_secs_f32());
        let turn = execution.work(rows) / (sms * kernels);
        Self { turn: turn as f32, kernels: kernels as f32, alone, ..self }
    }

    /// Returns the same occupant if it executes for only the fraction `part` of the time. The mean wait
    /// of other workers for this occupant is shorter in proportion.
    #[must_use]
    pub fn busy(self, part: f64) -> Self {
        Self { turn: self.turn * part as f32, ..self }
    }

    /// Returns the time for which a kernel of this worker waits for a kernel of another worker on the
    /// same SMs, in s.
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
    /// The division of the SMs into groups, or `None` if the GPU has no partitions.
    pub division: Option<Division>,
}

impl SharedGpu {
    /// Returns a GPU with this number of SMs, in CUDA's usual division into groups.
    pub fn new(sms: Sms) -> Self {
        Self { sms, division: Division::of(sms) }
    }

    /// Returns an idle worker on a partition. If the GPU has no partitions, the worker may use all SMs.
    pub fn occupant(&self, groups: Groups) -> Occupant {
        match &self.division {
            Some(division) => Occupant { groups, ..Occupant::anywhere(division.sms(groups)) },
            None => Occupant::anywhere(self.sms),
        }
    }

    fn sms_of(&self, groups: Groups) -> f64 {
        self.division.as_ref().map_or(0.0, |division| f64::from(division.sms(groups).0))
    }

    /// Returns the number of SMs of `own` that no other worker uses. Assumes that workers without a
    /// partition use SMs outside `own` first.
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

    /// Returns the time of a batch of `rows` rows that `own` runs while the other workers execute.
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

    /// Returns the time of `own`'s current batch in s, if its kernels take turns with the kernels of
    /// the other workers.
    fn in_turns(&self, own: Occupant, others: impl Iterator<Item = Occupant> + Clone) -> f64 {
        let free = self.free(own, others.clone());
        let met = |other: Occupant| self.met(own, other, free);
        let turns: f64 = others.clone().map(|other| met(other) * own.waits_for(other)).sum();
        let peers = others.filter(|other| other.priority == own.priority);
        let crowd = 1.0 + CROWD * (peers.map(met).sum::<f64>() - 1.0).max(0.0);
        f64::from(own.alone) + f64::from(own.kernels) * crowd * turns
    }

    /// Returns the fraction of the time that workers of a higher priority leave for `own`.
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

    /// Returns the fraction of the SMs of `own` that the other worker can also use. `free` is the
    /// number of SMs of `own` that are free.
    fn met(&self, own: Occupant, other: Occupant, free: f64) -> f64 {
        let (sms, all) = (f64::from(own.sms.0), f64::from(self.sms.0.max(1)));
        match (own.groups, other.groups) {
            (Groups::NONE, _) | (_, Groups::NONE) => {
                (sms - free) / sms.max(1.0) * f64::from(other.sms.0) / all
            }
            (one, other) => self.sms_of(one.common(other)) / sms,
        }
    }

    /// Returns the fraction of the GPU that the other worker uses outside the SMs of `own`. `free` is
    /// the number of SMs of `own` that are free.
    fn beside(&self, own: Occupant, other: Occupant, free: f64) -> f64 {
        let (sms, all) = (f64::from(own.sms.0), f64::from(self.sms.0.max(1)));
        match (own.groups, other.groups) {
            (Groups::NONE, _) | (_, Groups::NONE) => {
                // Without partitions, other workers are assumed to use SMs outside `own` if there are
                // enough SMs. Otherwise they are assumed to use SMs everywhere.
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

    /// Returns a table in which a row takes `ms` on 64 or more SMs, and twice as long on 32 SMs. The
    /// time is proportional to the number of rows.
    fn profile(ms: f64) -> Execution {
        Execution::new(vec![Sms(32), Sms(64)], vec![ExecutionRow { batch: 1, ms: vec![2.0 * ms, ms] }])
            .unwrap()
    }

    /// Returns the time of a batch of one row of `own`, which takes 1 ms alone. In the meantime, the
    /// other workers execute batches with the given numbers of rows.
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
        // One row of the other worker fills half of the GPU, so its turn is half the duration of a
        // kernel. The turn of a batch of eight rows is four times the duration of a kernel.
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
        // A batch has 200 kernels, so each turn of the other worker's batch of eight rows takes 20 µs.
        let normal_beside_below = beside(whole(), &[(8, below)]);
        assert_eq!(normal_beside_below, MS + Duration::from_micros(200 * 5));
        assert_eq!(beside(below, &[(8, below)]), beside(whole(), &[(8, whole())]), "peers take turns");
        // The normal worker's batch of one row executes for 1 ms on half of the SMs. In addition, its
        // kernels wait 0.5 ms for the kernels of the worker below normal.
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
        // Ten workers with a quarter of the GPU each count as 2.5 workers on an average SM.
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
