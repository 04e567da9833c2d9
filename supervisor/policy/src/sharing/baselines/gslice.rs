//! GSLICE's self-tuning (Dhakal, Kulkarni, Ramakrishnan, SoCC 2020, Algorithm 1), in the variant
//! that the authors of gpulet compared themselves with (casys-kaist/glet,
//! `src/common/self_tuning.cpp`), because the paper's own code was never published: mean latency,
//! dead band of 5 %, steps in proportion to the larger residual, batches by residual latency,
//! max-min allocation.
//!
//! The pace comes from iGniter's driver of the same algorithm: five steps of the batch, then one of
//! the share.

use shadowslice_shared::units::{Percent, Sms};

use super::super::difference::Target;
use super::super::{Facts, Live, Terms};

/// In percent (`_THRESHOLD`): smaller positive residuals are left alone.
const THRESHOLD: f64 = 5.0;

/// `_MAX_BATCH`.
const MAX_BATCH: u32 = 32;

const BATCH_STEPS: u32 = 5;

#[derive(Debug, Clone)]
pub(in super::super) struct Gslice {
    batches: Vec<u32>,
    shares: Vec<Sms>,
    steps: u32,
}

impl Gslice {
    pub(in super::super) fn new(terms: &[Terms]) -> Self {
        Self {
            batches: vec![1; terms.len()],
            shares: terms.iter().map(|terms| terms.initial).collect(),
            steps: 0,
        }
    }

    pub(in super::super) fn decide(&mut self, terms: &[Terms], facts: &Facts) -> Vec<Target> {
        for (batch, (terms, live)) in self.batches.iter_mut().zip(terms.iter().zip(&facts.models)) {
            *batch = next_batch(*batch, terms, live);
        }
        self.steps += 1;
        if self.steps == BATCH_STEPS {
            self.steps = 0;
            self.tune(terms, facts);
        }
        let target = |(&sms, &max_batch)| Target::divided(sms, max_batch);
        self.shares.iter().zip(&self.batches).map(target).collect()
    }

    fn tune(&mut self, terms: &[Terms], facts: &Facts) {
        for (gpu, &sms) in facts.gpus.iter().enumerate() {
            let here: Vec<usize> = (0..terms.len()).filter(|&model| terms[model].gpu == gpu).collect();
            let percent = |model: usize| {
                let live = &facts.models[model];
                wanted(Percent::smallest_for(live.share, sms).get(), &terms[model], live)
            };
            let wants: Vec<u32> = here.iter().map(|&model| percent(model)).collect();
            for (&model, granted) in here.iter().zip(max_min(&wants, 100)) {
                let percent = Percent::new(granted.clamp(1, 100)).expect("clamped to 1..=100");
                self.shares[model] = percent.sms_of(sms);
            }
        }
    }
}

/// The batch grows by its residual latency, or shrinks by as much.
fn next_batch(batch: u32, terms: &Terms, live: &Live) -> u32 {
    let limit = MAX_BATCH.min(terms.max_batch);
    if live.seen.mean_latency.is_zero() {
        return batch.min(limit);
    }
    let residual = 1.0 - live.seen.mean_latency.as_secs_f64() / terms.slo.as_secs_f64().max(1e-9);
    let next = f64::from(batch) * (1.0 + residual.max(-1.0));
    (next as u32).clamp(1, limit)
}

fn wanted(percent: u32, terms: &Terms, live: &Live) -> u32 {
    let seen = &live.seen;
    if seen.arrived == 0 || seen.span.is_zero() {
        return percent;
    }
    let latency = 100.0 * (1.0 - seen.mean_latency.as_secs_f64() / terms.slo.as_secs_f64().max(1e-9));
    let throughput = 100.0 * (seen.answered as f64 / seen.arrived as f64 - 1.0);
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

/// The smallest demand first; no model gets more than an equal part of what is left.
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

    use super::super::super::fixtures::{live, terms};
    use super::*;

    fn seen(mean_ms: u64, arrived: u64, answered: u64) -> Live {
        let mut live = live(Sms(40));
        live.seen.mean_latency = Duration::from_millis(mean_ms);
        (live.seen.arrived, live.seen.answered) = (arrived, answered);
        live
    }

    #[test]
    fn slack_in_both_shrinks_and_lack_of_either_grows() {
        let terms = terms("a", 100);
        assert_eq!(wanted(40, &terms, &seen(98, 100, 104)), 40, "within the dead band");
        assert_eq!(wanted(40, &terms, &seen(49, 100, 104)), 20);
        assert_eq!(wanted(40, &terms, &seen(151, 100, 104)), 60);
        assert_eq!(wanted(40, &terms, &seen(98, 100, 49)), 60);
        assert_eq!(wanted(40, &terms, &seen(0, 0, 0)), 40, "nothing came");
    }

    #[test]
    fn batches_follow_the_residual_latency() {
        let terms = terms("a", 100);
        assert_eq!(next_batch(4, &terms, &seen(50, 1, 1)), 6);
        assert_eq!(next_batch(4, &terms, &seen(500, 1, 1)), 1);
        assert_eq!(next_batch(4, &terms, &seen(0, 1, 0)), 4);
        assert_eq!(next_batch(30, &terms, &seen(1, 1, 1)), terms.max_batch);
    }

    #[test]
    fn what_is_small_gets_what_it_wants_and_the_rest_is_divided_equally() {
        assert_eq!(max_min(&[10, 90, 80], 100), [10, 45, 45]);
        assert_eq!(max_min(&[10, 20], 100), [10, 20]);
        assert_eq!(max_min(&[], 100), []);
    }
}
