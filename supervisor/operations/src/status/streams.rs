//! The status of a model's streams.

use serde::{Deserialize, Serialize};
use shadowslice_config::SloTarget;
use shadowslice_datapath::pipeline::StreamReport;
use shadowslice_shared::units::ms;

use super::Latency;

/// The streams of a model.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct StreamStatus {
    /// The number of open streams.
    pub open: u32,
    /// The maximum number of open streams of a worker.
    pub max: u32,
    /// The number of answers per second after the first answer of each stream, over the last 10 s.
    pub answers_per_s: f64,
    /// The times between two answers of a stream in the last minute or two, in ms.
    pub gap_ms: Latency,
    /// The SLO of the time between two answers in ms, or `None` if it has no limit.
    pub next_ms: Option<f64>,
    /// The fraction of the answers that met this SLO in the last minute or two.
    pub attainment: Option<f64>,
}

impl StreamStatus {
    /// Returns the status of streams with this SLO.
    pub(super) fn of(report: &StreamReport, slo: &SloTarget) -> Self {
        let StreamReport { open, limits, gaps, answers_per_s } = report;
        Self {
            open: *open,
            max: limits.open,
            answers_per_s: *answers_per_s,
            gap_ms: Latency { p50: gaps.p50_ms, p99: gaps.p99_ms },
            next_ms: slo.next.map(ms),
            attainment: slo.next.and_then(|_| gaps.traffic.counts.attainment()),
        }
    }
}
