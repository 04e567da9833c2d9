//! The scheduling policy of gpulet (Choi et al., USENIX ATC 2022). It follows the published artifact
//! (casys-kaist/glet, `src/scheduler/scheduler_incremental.cpp` and `src/service/`):
//!
//! * Epochs last 20 s.
//! * A GPU has at most two partitions, in a few fixed sizes.
//! * Demand is multiplied by a head-room factor.
//! * A model gets the smallest partition that is sufficient according to the model's profile.
//!
//! In gpulet, models that share a partition take turns. Here, these models are separate workers with
//! the same share, and the GPU divides the partition between them. A model without a profile is assumed
//! to need a whole partition.

use std::time::Duration;

use shadowslice_policy::sharing::{ModelSpec, Observation, PolicyInput, ShareTarget};
use shadowslice_shared::profile::Profile;
use shadowslice_shared::units::{Percent, Sms, Timestamp};

/// The time between two decisions about partitions.
const EPOCH: Duration = Duration::from_secs(20);

/// The sizes of the two partitions of a GPU, in percent. The artifact's `resource/` directory has
/// profiles for sizes of 20, 40, 50, 60, 80 and 100.
const PARTITION_SIZES: [[u32; 2]; 4] = [[100, 0], [80, 20], [60, 40], [50, 50]];

/// The maximum batch size, in rows.
const MAX_BATCH: u32 = 32;

/// The weight of the latest request rate in the exponential mean.
const RATE_WEIGHT: f64 = 0.5;

/// The request rate in requests per second below which the head-room factor is larger.
const SLOW_RATE: f64 = 125.0;
/// The head-room factor: partitions are planned for the request rate times this factor.
const HEADROOM: f64 = 1.2;
/// The head-room factor for rates below [`SLOW_RATE`].
const HEADROOM_SLOW: f64 = 1.5;

/// The changes of a request rate that justify new partitions: an increase by the factor `RATE_RISE` or
/// by `RATE_RISE_RPS` requests per second, or a decrease by the factor `RATE_FALL`.
const RATE_RISE: f64 = 1.05;
const RATE_RISE_RPS: f64 = 10.0;
const RATE_FALL: f64 = 0.9;

#[derive(Debug, Clone)]
pub(super) struct Gpulet {
    rates: Vec<RateEstimate>,
    planned: Option<Timestamp>,
    targets: Vec<ShareTarget>,
}

/// The request rate of a model, in requests per second.
#[derive(Debug, Clone, Copy, Default)]
struct RateEstimate {
    mean: Option<f64>,
    /// The highest mean rate in the current epoch.
    highest: f64,
    /// The rate for which the current partitions were planned.
    planned: f64,
}

impl Gpulet {
    pub(super) fn new(specs: &[ModelSpec]) -> Self {
        let target = |spec: &ModelSpec| ShareTarget::plain(spec.initial, spec.max_batch);
        Self {
            rates: vec![RateEstimate::default(); specs.len()],
            planned: None,
            targets: specs.iter().map(target).collect(),
        }
    }

    pub(super) fn decide(&mut self, specs: &[ModelSpec], input: &PolicyInput) -> Vec<ShareTarget> {
        for (rate, snapshot) in self.rates.iter_mut().zip(&input.models) {
            rate.observe(&snapshot.observation);
        }
        let over = self.planned.is_none_or(|planned| input.now.since(planned) >= EPOCH);
        if over {
            self.planned = Some(input.now);
            if self.rates.iter().any(RateEstimate::moved) {
                self.partition(specs, &input.gpus);
            }
            self.rates.iter_mut().for_each(|rate| rate.highest = rate.mean.unwrap_or(0.0));
        }
        self.targets.clone()
    }

    fn partition(&mut self, specs: &[ModelSpec], gpus: &[Sms]) {
        for rate in &mut self.rates {
            rate.planned = rate.target();
        }
        for (gpu, &sms) in gpus.iter().enumerate() {
            let mut here: Vec<usize> = (0..specs.len()).filter(|&model| specs[model].gpu == gpu).collect();
            let load = |model: usize| self.rates[model].planned * specs[model].slo.as_secs_f64();
            here.sort_by(|&a, &b| load(a).total_cmp(&load(b)));
            let needs = |percent: u32| -> Vec<PartitionNeed> {
                let need = |&model: &usize| {
                    PartitionNeed::of(&specs[model], self.rates[model].planned, percent, sms)
                };
                here.iter().map(need).collect()
            };
            let plan = PARTITION_SIZES
                .iter()
                .map(|sizes| PartitionPlan::fill(*sizes, needs))
                .min_by(PartitionPlan::compare);
            let Some(plan) = plan else { continue };
            for (&model, (percent, batch)) in here.iter().zip(plan.places) {
                let share = Percent::new(percent).expect("sizes are from 20 to 100").sms_of(sms);
                self.targets[model] = ShareTarget::plain(share, batch);
            }
        }
    }
}

impl RateEstimate {
    fn observe(&mut self, observation: &Observation) {
        if !observation.span.is_zero() {
            let rate = observation.rows as f64 / observation.span.as_secs_f64();
            let mean = self.mean.map_or(rate, |mean| mean + RATE_WEIGHT * (rate - mean));
            self.highest = self.highest.max(mean);
            self.mean = Some(mean);
        }
    }

    fn target(&self) -> f64 {
        self.highest * if self.highest < SLOW_RATE { HEADROOM_SLOW } else { HEADROOM }
    }

    fn moved(&self) -> bool {
        let target = self.target();
        target > self.planned * RATE_RISE
            || target > self.planned + RATE_RISE_RPS
            || target < self.planned * RATE_FALL
    }
}

/// The time that a model needs on a partition of a given size.
#[derive(Debug, Clone, Copy)]
struct PartitionNeed {
    /// The fraction of the time for which the model needs the partition.
    duty: f64,
    batch: u32,
}

impl PartitionNeed {
    /// Returns the fraction of a partition's time that a model needs with its best batch size. The best
    /// size has the highest throughput among all sizes whose batches take at most half of the SLO.
    fn of(spec: &ModelSpec, rate: f64, percent: u32, gpu: Sms) -> Self {
        let limit = MAX_BATCH.min(spec.max_batch);
        let (Some(profile), Ok(percent)) = (&spec.profile, Percent::new(percent)) else {
            return Self { duty: 1.0, batch: limit };
        };
        let sms = percent.sms_of(gpu);
        let capacity = |batch: u32| f64::from(batch) / seconds(profile, batch, sms);
        let fits = |&batch: &u32| 2.0 * seconds(profile, batch, sms) <= spec.slo.as_secs_f64();
        let best = (1..=limit).filter(fits).max_by(|&a, &b| capacity(a).total_cmp(&capacity(b)));
        best.map_or(Self { duty: f64::INFINITY, batch: 1 }, |batch| Self {
            duty: rate / capacity(batch),
            batch,
        })
    }
}

fn seconds(profile: &Profile, batch: u32, sms: Sms) -> f64 {
    profile.execution.time(batch, f64::from(sms.0)).as_secs_f64().max(1e-9)
}

/// A division of a GPU into two partitions, and the assignment of models to them.
#[derive(Debug)]
struct PartitionPlan {
    places: Vec<(u32, u32)>,
    /// The number of models for which no partition has enough time left.
    unplaced: usize,
    /// True if all models take turns on the whole GPU.
    whole: bool,
    /// The duty of the partition with the higher duty.
    fullest: f64,
}

impl PartitionPlan {
    /// Assigns each model to the smallest partition that has enough time left for it. If neither
    /// partition has enough time left, assigns the model to the partition with the lower duty.
    fn fill(sizes: [u32; 2], needs: impl Fn(u32) -> Vec<PartitionNeed>) -> Self {
        let by_size = sizes.map(&needs);
        let mut duties = [0.0, if sizes[1] == 0 { f64::INFINITY } else { 0.0 }];
        let mut plan = Self { places: Vec::new(), unplaced: 0, whole: sizes[1] == 0, fullest: 0.0 };
        for (small, large) in by_size[1].iter().zip(&by_size[0]) {
            let need = [*large, *small];
            let fits = |partition: &usize| duties[*partition] + need[*partition].duty <= 1.0;
            let chosen = [1, 0].into_iter().find(fits).unwrap_or_else(|| {
                plan.unplaced += 1;
                usize::from(duties[1] < duties[0])
            });
            duties[chosen] += need[chosen].duty;
            plan.places.push((sizes[chosen], need[chosen].batch));
        }
        plan.fullest = duties.into_iter().filter(|duty| duty.is_finite()).fold(0.0, f64::max);
        plan
    }

    /// Compares two plans. The lesser plan is better. A plan with fewer unplaced models is better. If
    /// the numbers are equal, two partitions are better than turns on the whole GPU.
    fn compare(&self, other: &Self) -> std::cmp::Ordering {
        let in_turns = self.whole.cmp(&other.whole);
        self.unplaced.cmp(&other.unplaced).then(in_turns).then(self.fullest.total_cmp(&other.fullest))
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::{profile, snapshot, spec};
    use super::*;

    fn two() -> Vec<ModelSpec> {
        let model = |name, work| ModelSpec { profile: Some(profile(1.0, work, 132)), ..spec(name, 100) };
        vec![model("light", 30.0), model("heavy", 300.0)]
    }

    fn input(seconds: u64, rates: [u64; 2]) -> PolicyInput {
        let model = |rate: u64| {
            let mut snapshot = snapshot(Sms(40));
            (snapshot.observation.arrived, snapshot.observation.rows) = (rate / 2, rate / 2);
            snapshot
        };
        PolicyInput {
            now: Timestamp::after_origin(Duration::from_secs(seconds)),
            gpus: vec![Sms(132)],
            models: rates.map(model).to_vec(),
        }
    }

    #[test]
    fn a_heavy_and_a_light_model_get_a_large_and_a_small_partition() {
        let specs = two();
        let targets = Gpulet::new(&specs).decide(&specs, &input(0, [400, 400]));
        assert!(targets[0].sms < targets[1].sms, "{targets:?}");
        assert!(targets[0].sms.0 + targets[1].sms.0 <= 132, "{targets:?}");
    }

    #[test]
    fn a_rate_is_the_first_value_and_then_a_mean() {
        let planned_for = |rates: &[u64]| {
            let mut rate = RateEstimate::default();
            for &came in rates {
                rate.observe(&input(0, [came, 0]).models[0].observation);
            }
            rate.target()
        };
        assert_eq!(planned_for(&[400]), 480.0);
        assert_eq!(planned_for(&[100]), 150.0, "a slow rate gets more head-room");
        assert_eq!(planned_for(&[400, 800]), 720.0);
        assert_eq!(planned_for(&[]), 0.0);
    }

    #[test]
    fn nothing_changes_within_an_epoch() {
        let specs = two();
        let mut gpulet = Gpulet::new(&specs);
        let first = gpulet.decide(&specs, &input(0, [400, 10]));
        assert_eq!(gpulet.decide(&specs, &input(19, [10, 900])), first);
        assert_ne!(gpulet.decide(&specs, &input(20, [10, 900])), first);
    }

    #[test]
    fn absurd_input_does_no_harm() {
        let mut specs = two();
        specs[0].profile = None;
        specs[1].slo = Duration::from_nanos(1);
        let targets = Gpulet::new(&specs).decide(&specs, &input(0, [0, u64::MAX / 4]));
        assert!(targets.iter().all(|target| target.sms >= Sms(2) && target.admission.max_batch >= 1));
    }
}
