//! The metrics of traces.

use super::text::MetricType::Counter;
use super::text::{Metric, Sample};

/// Spans that came to that end.
pub(super) type Ended = (&'static str, u64);

/// All metrics of traces.
pub(super) const METRICS: &[Metric<Ended>] = &[Metric {
    name: "shadowslice_trace_spans_total",
    kind: Counter,
    help: "Spans of traced requests, by outcome: exported, or dropped as the queue was full, unsent, or rejected.",
    samples: |(_, spans)| vec![Sample { suffix: "", labels: Vec::new(), value: *spans as f64 }],
}];
