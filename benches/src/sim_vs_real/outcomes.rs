//! The outcomes of the requests in a simulated or real run.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;
use shadowslice_simulator::results::SimulationRun;

/// The outcomes of all requests of a run.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct RunOutcome {
    /// The outcomes of all models together.
    pub(crate) all: OutcomeCounts,
    /// The outcomes of each model, by name.
    pub(crate) per_model: BTreeMap<String, OutcomeCounts>,
}

/// The outcomes of all requests, or of the requests of one model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub(crate) struct OutcomeCounts {
    pub(crate) slo_ms: f64,
    pub(crate) offered: u64,
    /// The number of requests answered within the SLO.
    pub(crate) in_time: u64,
    pub(crate) refused: u64,
    /// The 99th percentile of the latency, in ms. The latency counts from the scheduled arrival.
    /// Without answers, the value is 0.
    pub(crate) p99_ms: f64,
    /// The number of share changes that took effect.
    pub(crate) repartitions: u64,
}

impl RunOutcome {
    /// Returns the outcomes of a simulated run. `lasted` is the duration of the run.
    pub(crate) fn simulated(run: &SimulationRun, lasted: Duration) -> Self {
        let seconds = lasted.as_secs_f64();
        let per_model: BTreeMap<String, OutcomeCounts> = run
            .per_model
            .iter()
            .map(|(name, model)| {
                let part = OutcomeCounts {
                    slo_ms: model.slo_ms,
                    offered: model.offered,
                    in_time: (model.goodput_rps * seconds).round() as u64,
                    refused: model.refused,
                    p99_ms: model.p99_ms,
                    repartitions: model.repartitions,
                };
                (name.clone(), part)
            })
            .collect();
        Self { all: OutcomeCounts { p99_ms: run.p99_ms, ..sum(per_model.values()) }, per_model }
    }

    /// Returns the outcomes of a run. `per_model` are the outcomes of its models, and `p99_ms` is
    /// the p99 latency over all models.
    pub(crate) fn of(per_model: BTreeMap<String, OutcomeCounts>, p99_ms: f64) -> Self {
        Self { all: OutcomeCounts { p99_ms, ..sum(per_model.values()) }, per_model }
    }
}

/// Returns the sum of each count over all parts.
fn sum<'p>(parts: impl Iterator<Item = &'p OutcomeCounts>) -> OutcomeCounts {
    parts.fold(OutcomeCounts::default(), |all, part| OutcomeCounts {
        offered: all.offered + part.offered,
        in_time: all.in_time + part.in_time,
        refused: all.refused + part.refused,
        repartitions: all.repartitions + part.repartitions,
        ..all
    })
}
