//! The results of a run, as operators and scripts read them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::scenario::Scenario;
use crate::time::{ms, ns};
use crate::world::{RequestTally, WorldOutcome};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SimulationRun {
    pub policy: String,
    pub load: String,
    pub seed: u64,
    pub offered_rps: f64,
    pub goodput_rps: f64,
    /// Requests answered within their SLOs, of those offered; 1 when nothing was.
    pub attainment: f64,
    /// Of the answers; 0 without any.
    pub p99_ms: f64,
    /// Requests a second within the [fluid bound](crate::bound::fluid), the same for every policy.
    pub bound_rps: f64,
    /// Hand-overs that came to effect.
    pub repartitions: u64,
    pub per_model: BTreeMap<String, ModelRun>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelRun {
    /// 1 is the highest.
    pub priority: u32,
    pub slo_ms: f64,
    pub offered_rps: f64,
    pub goodput_rps: f64,
    pub attainment: f64,
    /// Of the answers, as the latencies below; 0 without any.
    pub mean_ms: f64,
    pub p50_ms: f64,
    pub p99_ms: f64,
    pub offered: u64,
    /// Late or not.
    pub answered: u64,
    pub refused: u64,
    /// Requests that still waited at the end.
    pub pending: u64,
    pub repartitions: u64,
    pub repartitioned_at_s: Vec<f64>,
    /// The share in force at the end.
    pub sms: u32,
}

/// The same for every policy that meets a load.
#[derive(Debug, Clone, PartialEq)]
pub struct LoadInfo {
    pub load: String,
    pub seed: u64,
    pub seconds: f64,
    pub bound_rps: f64,
}

impl SimulationRun {
    pub fn new(policy: &str, trial: &LoadInfo, scenario: &Scenario, outcome: &WorldOutcome) -> Self {
        let seconds = trial.seconds;
        let mut all = RequestTally::new();
        let mut per_model = BTreeMap::new();
        for (served, model) in scenario.models.iter().zip(&outcome.models) {
            let tally = &model.tally;
            all.add(tally);
            let run = ModelRun {
                priority: served.terms.priority,
                slo_ms: ms(ns(served.terms.slo)),
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
            };
            per_model.insert(served.terms.name.clone(), run);
        }
        Self {
            policy: policy.to_owned(),
            load: trial.load.clone(),
            seed: trial.seed,
            offered_rps: all.arrived as f64 / seconds,
            goodput_rps: all.in_time as f64 / seconds,
            attainment: attainment(&all),
            p99_ms: ms(all.latency.value_at_quantile(0.99)),
            bound_rps: trial.bound_rps,
            repartitions: outcome.models.iter().map(|model| model.repartitions.len() as u64).sum(),
            per_model,
        }
    }
}

fn attainment(tally: &RequestTally) -> f64 {
    if tally.arrived == 0 { 1.0 } else { tally.in_time as f64 / tally.arrived as f64 }
}
