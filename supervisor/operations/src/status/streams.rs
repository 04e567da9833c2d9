//! The status of a model's streams.

use serde::{Deserialize, Serialize};
use shadowslice_config::SloTarget;
use shadowslice_control::models::Served;
use shadowslice_datapath::pipeline::StreamReport;
use shadowslice_shared::units::ms;

use super::Latency;
use crate::figures;

/// Describes the streams of a model, or returns `None` if it has none.
pub(crate) fn streams(served: &Served) -> Option<String> {
    StreamStatus::of(&served.pipeline.report().streams?, &served.model.slo).text()
}

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

    /// Describes the streams, or returns `None` if no stream is open and none has had a second answer.
    pub(crate) fn text(&self) -> Option<String> {
        let Self { open, max, answers_per_s, gap_ms, .. } = self;
        if *open == 0 && gap_ms.p99 == 0.0 {
            return None;
        }
        let within = self.next_ms.zip(self.attainment);
        let within = within.map_or(String::new(), |(next, part)| {
            format!(", {} within {} ms", figures::percent(part), figures::ms(next))
        });
        Some(format!(
            "{open} of {max} streams open, {} answers/s, p50 {} and p99 {} ms between answers{within}",
            figures::count(answers_per_s.round() as u64),
            figures::ms(gap_ms.p50),
            figures::ms(gap_ms.p99),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_are_described_once_there_are_some() {
        let idle = StreamStatus { max: 32, ..StreamStatus::default() };
        assert_eq!(idle.text(), None);
        let gap_ms = Latency { p50: 2.96, p99: 20.5 };
        let busy = StreamStatus { open: 16, answers_per_s: 640.4, gap_ms, ..idle };
        let expected = "16 of 32 streams open, 640 answers/s, p50 3.0 and p99 20 ms between answers";
        assert_eq!(busy.text().unwrap(), expected);
        let judged = StreamStatus { next_ms: Some(60.0), attainment: Some(0.995), ..busy };
        assert_eq!(judged.text().unwrap(), format!("{expected}, 99.50% within 60 ms"));
    }
}
