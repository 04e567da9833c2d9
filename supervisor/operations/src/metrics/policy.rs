//! The metrics of the policy. They have no values where no policy decides.

use super::Policy;
use super::table::histogram;
use super::text::Metric;
use super::text::MetricType::Histogram;

/// All metrics of the policy.
pub(super) const METRICS: &[Metric<Policy>] = &[Metric {
    name: "shadowslice_decision_duration_seconds",
    kind: Histogram,
    help: "How long the policy took to decide.",
    samples: |policy| histogram(&policy.took),
}];
