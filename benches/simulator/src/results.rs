//! The results of a run, which `shadowslice-simulate` prints as a table or as JSON.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::scenario::{Scenario, SleepRule};
use crate::time::{ms, ns};
use crate::world::{RequestTally, WorldOutcome};

/// The results of one policy with one load.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SimulationRun {
    pub policy: String,
    pub load: String,
    pub seed: u64,
    pub offered_rps: f64,
    pub goodput_rps: f64,
    /// The fraction of offered requests that were answered within their SLO. Without requests, the
    /// value is 1.
    pub attainment: f64,
    /// The 99th percentile of the latency of answers, in ms. Without answers, the value is 0.
    pub p99_ms: f64,
    /// The [fluid bound](crate::bound::fluid) of the load, in requests per second. It is the same
    /// for every policy.
    pub bound_rps: f64,
    /// The number of share changes that took effect.
    pub repartitions: u64,
    pub per_model: BTreeMap<String, ModelRun>,
}

/// The results of one model in a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelRun {
    /// The priority of the model. 1 is the highest priority.
    pub priority: u32,
    pub slo_ms: f64,
    pub offered_rps: f64,
    pub goodput_rps: f64,
    pub attainment: f64,
    /// The mean latency of answers, in ms. Without answers, the value is 0.
    pub mean_ms: f64,
    pub p50_ms: f64,
    pub p99_ms: f64,
    pub offered: u64,
    /// The number of answered requests, including late ones.
    pub answered: u64,
    pub refused: u64,
    /// The number of requests that had no answer at the end of the run.
    pub pending: u64,
    pub repartitions: u64,
    pub repartitioned_at_s: Vec<f64>,
    /// The model's share at the end of the run, in SMs.
    pub sms: u32,
    /// The sleep of the model, or `None` if the model never sleeps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sleep: Option<SleepRun>,
    /// The waits between two pieces, or `None` if no batch of the model waited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pauses: Option<PauseRun>,
}

/// The waits of one model's batches, between two pieces, for batches of other models.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct PauseRun {
    pub count: u64,
    pub longest_ms: f64,
    /// The fraction of the run during which batches waited.
    pub waiting: f64,
}

/// The sleep of one model in a run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SleepRun {
    pub wakes: u64,
    /// The fraction of the run during which the model's weights were copied to the GPU.
    pub waking: f64,
}

/// The properties of a load that are the same for all policies.
#[derive(Debug, Clone, PartialEq)]
pub struct LoadInfo {
    pub load: String,
    pub seed: u64,
    pub seconds: f64,
    pub bound_rps: f64,
}

impl SimulationRun {
    /// Returns the results of a policy from the outcome of its run.
    pub fn new(policy: &str, load: &LoadInfo, scenario: &Scenario, outcome: &WorldOutcome) -> Self {
        let seconds = load.seconds;
        let mut all = RequestTally::new();
        let mut per_model = BTreeMap::new();
        for (spec, model) in scenario.models.iter().zip(&outcome.models) {
            let tally = &model.tally;
            all.add(tally);
            let run = ModelRun {
                priority: spec.terms.priority,
                slo_ms: ms(ns(spec.terms.slo)),
                offered_rps: tally.arrived as f64 / seconds,
                goodput_rps: tally.in_time as f64 / seconds,
                attainment: attainment(tally),
                mean_ms: ms(tally.mean_ns()),
                p50_ms: ms(tally.latency.value_at_quantile(0.5)),
                p99_ms: ms(tally.latency.value_at_quantile(0.99)),
                offered: tally.arrived,
                answered: tally.answered,
                refused: tally.refused,
                pending: model.pending,
                repartitions: model.repartitions.len() as u64,
                repartitioned_at_s: model.repartitions.iter().map(|&at| ms(at) / 1e3).collect(),
                sms: model.share,
                sleep: (spec.sleep != SleepRule::Never).then(|| SleepRun {
                    wakes: model.sleep.wakes,
                    waking: ms(model.sleep.wake_ns) / 1e3 / seconds,
                }),
                pauses: (model.pauses.count > 0).then(|| PauseRun {
                    count: model.pauses.count,
                    longest_ms: ms(model.pauses.longest_ns),
                    waiting: ms(model.pauses.sum_ns) / 1e3 / seconds,
                }),
            };
            per_model.insert(spec.terms.name.clone(), run);
        }
        Self {
            policy: policy.to_owned(),
            load: load.load.clone(),
            seed: load.seed,
            offered_rps: all.arrived as f64 / seconds,
            goodput_rps: all.in_time as f64 / seconds,
            attainment: attainment(&all),
            p99_ms: ms(all.latency.value_at_quantile(0.99)),
            bound_rps: load.bound_rps,
            repartitions: outcome.models.iter().map(|model| model.repartitions.len() as u64).sum(),
            per_model,
        }
    }
}

fn attainment(tally: &RequestTally) -> f64 {
    if tally.arrived == 0 { 1.0 } else { tally.in_time as f64 / tally.arrived as f64 }
}
