//! The self-tuning policy of GSLICE (Dhakal, Kulkarni, Ramakrishnan, SoCC 2020, Algorithm 1). The
//! authors never published their code. This implementation follows the variant with which the authors
//! of gpulet compared their work (casys-kaist/glet, `src/common/self_tuning.cpp`):
//!
//! * It uses the mean latency and a dead band of 5 %.
//! * The step of a share is proportional to the larger of the residuals of latency and throughput.
//! * The batch size is adjusted in proportion to the residual of the latency.
//! * Shares are allocated by max-min fairness.
//!
//! Five steps of the batch size are followed by one step of the share. This order comes from the driver
//! of another published scheduler, iGniter, for the same algorithm.

use shadowslice_policy::sharing::{ModelSnapshot, ModelSpec, PolicyInput, ShareTarget};
use shadowslice_shared::units::{Percent, Sms};

/// The dead band in percent (`_THRESHOLD`). If both residuals are positive and smaller than this value,
/// the share does not change.
const THRESHOLD: f64 = 5.0;

/// The maximum batch size, in rows (`_MAX_BATCH`).
const MAX_BATCH: u32 = 32;

/// The number of steps of the batch size before each step of the share.
const BATCH_STEPS: u32 = 5;

#[derive(Debug, Clone)]
pub(super) struct Gslice {
    batches: Vec<u32>,
    shares: Vec<Sms>,
    steps: u32,
}

impl Gslice {
    pub(super) fn new(specs: &[ModelSpec]) -> Self {
        Self {
            batches: vec![1; specs.len()],
            shares: specs.iter().map(|spec| spec.initial).collect(),
            steps: 0,
        }
    }

    pub(super) fn decide(&mut self, specs: &[ModelSpec], input: &PolicyInput) -> Vec<ShareTarget> {
        for (batch, (spec, snapshot)) in self.batches.iter_mut().zip(specs.iter().zip(&input.models)) {
            *batch = next_batch(*batch, spec, snapshot);
        }
        self.steps += 1;
        if self.steps == BATCH_STEPS {
            self.steps = 0;
            self.tune(specs, input);
        }
        let target = |(&sms, &max_batch)| ShareTarget::plain(sms, max_batch);
        self.shares.iter().zip(&self.batches).map(target).collect()
    }

    fn tune(&mut self, specs: &[ModelSpec], input: &PolicyInput) {
        for (gpu, &sms) in input.gpus.iter().enumerate() {
            let here: Vec<usize> = (0..specs.len()).filter(|&model| specs[model].gpu == gpu).collect();
            let percent = |model: usize| {
                let snapshot = &input.models[model];
                wanted(Percent::smallest_for(snapshot.share, sms).get(), &specs[model], snapshot)
            };
            let wants: Vec<u32> = here.iter().map(|&model| percent(model)).collect();
            for (&model, granted) in here.iter().zip(max_min(&wants, 100)) {
                let percent = Percent::new(granted.clamp(1, 100)).expect("clamped to 1..=100");
                self.shares[model] = percent.sms_of(sms);
            }
        }
    }
}

/// Returns the next batch size. The change is the present batch size times the residual, which is the
/// unused fraction of the SLO. The batch size grows if the mean latency is below the SLO, and shrinks
/// if the mean latency exceeds the SLO.
fn next_batch(batch: u32, spec: &ModelSpec, snapshot: &ModelSnapshot) -> u32 {
    let limit = MAX_BATCH.min(spec.max_batch);
    if snapshot.observation.mean_latency.is_zero() {
        return batch.min(limit);
    }
    let residual = 1.0 - snapshot.observation.mean_latency.as_secs_f64() / spec.slo.as_secs_f64().max(1e-9);
    let next = f64::from(batch) * (1.0 + residual.max(-1.0));
    (next as u32).clamp(1, limit)
}

/// Returns the share that a model requests, in percent.
fn wanted(percent: u32, spec: &ModelSpec, snapshot: &ModelSnapshot) -> u32 {
    let observation = &snapshot.observation;
    if observation.arrived == 0 || observation.span.is_zero() {
        return percent;
    }
    let latency = 100.0 * (1.0 - observation.mean_latency.as_secs_f64() / spec.slo.as_secs_f64().max(1e-9));
    let throughput = 100.0 * (observation.answered as f64 / observation.arrived as f64 - 1.0);
    let within = |residual: f64| residual > 0.0 && residual < THRESHOLD;
    if within(latency) && within(throughput) {
        return percent;
    }
    let step = (f64::from(percent) * latency.abs().max(throughput.abs()) / 100.0) as u32;
    if latency > 0.0 && throughput > 0.0 {
        percent.saturating_sub(step)
    } else {
        percent.saturating_add(step)
    }
}

/// Divides `total` by max-min fairness. Grants the smallest request first. No model gets more than an
/// equal part of the remainder.
fn max_min(wants: &[u32], total: u32) -> Vec<u32> {
    let mut order: Vec<usize> = (0..wants.len()).collect();
    order.sort_by_key(|&index| wants[index]);
    let mut granted = vec![0; wants.len()];
    let mut left = total;
    for (served, &index) in order.iter().enumerate() {
        let part = left / (wants.len() - served) as u32;
        granted[index] = wants[index].min(part);
        left -= granted[index];
    }
    granted
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::fixtures::{snapshot, spec};
    use super::*;

    fn observation(mean_ms: u64, arrived: u64, answered: u64) -> ModelSnapshot {
        let mut snapshot = snapshot(Sms(40));
        snapshot.observation.mean_latency = Duration::from_millis(mean_ms);
        (snapshot.observation.arrived, snapshot.observation.answered) = (arrived, answered);
        snapshot
    }

    #[test]
    fn the_share_shrinks_with_slack_in_both_and_grows_otherwise() {
        let spec = spec("a", 100);
        assert_eq!(wanted(40, &spec, &observation(98, 100, 104)), 40, "within the dead band");
        assert_eq!(wanted(40, &spec, &observation(49, 100, 104)), 20);
        assert_eq!(wanted(40, &spec, &observation(151, 100, 104)), 60);
        assert_eq!(wanted(40, &spec, &observation(98, 100, 49)), 60);
        assert_eq!(wanted(40, &spec, &observation(0, 0, 0)), 40, "no request arrived");
    }

    #[test]
    fn batches_follow_the_residual_latency() {
        let spec = spec("a", 100);
        assert_eq!(next_batch(4, &spec, &observation(50, 1, 1)), 6);
        assert_eq!(next_batch(4, &spec, &observation(500, 1, 1)), 1);
        assert_eq!(next_batch(4, &spec, &observation(0, 1, 0)), 4);
        assert_eq!(next_batch(30, &spec, &observation(1, 1, 1)), spec.max_batch);
    }

    #[test]
    fn small_demands_are_met_and_the_rest_is_divided_equally() {
        assert_eq!(max_min(&[10, 90, 80], 100), [10, 45, 45]);
        assert_eq!(max_min(&[10, 20], 100), [10, 20]);
        assert_eq!(max_min(&[], 100), []);
    }
}
