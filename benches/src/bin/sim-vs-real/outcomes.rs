//! The outcomes of a simulated or real run.

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
    /// The 99th percentile of the latency since the scheduled arrival, in ms. The value is 0
    /// without answers.
    pub(crate) p99_ms: f64,
    /// The number of share changes that took effect.
    pub(crate) repartitions: u64,
}

impl RunOutcome {
    /// Returns the outcomes of a simulated run, which lasted this long.
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

    /// Returns the outcomes of a run from the outcomes of its models and the p99 over all models.
    pub(crate) fn of(per_model: BTreeMap<String, OutcomeCounts>, p99_ms: f64) -> Self {
        Self { all: OutcomeCounts { p99_ms, ..sum(per_model.values()) }, per_model }
    }
}

/// Returns the sums of all counts.
fn sum<'p>(parts: impl Iterator<Item = &'p OutcomeCounts>) -> OutcomeCounts {
    parts.fold(OutcomeCounts::default(), |all, part| OutcomeCounts {
        offered: all.offered + part.offered,
        in_time: all.in_time + part.in_time,
        refused: all.refused + part.refused,
        repartitions: all.repartitions + part.repartitions,
        ..all
    })
}
