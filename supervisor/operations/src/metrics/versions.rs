//! The metrics of versions and rollouts.

use super::ModelMetrics;
use super::table::one;
use super::text::{Metric, MetricSample, counter, gauge};
use crate::status::RolloutStatus;

pub(super) const METRICS: &[Metric<ModelMetrics>] = &[
    gauge(
        "shadowslice_model_released",
        "1 if this version answers requests that name no version; else 0.",
        |model| one(f64::from(model.status.role.is_released())),
    ),
    gauge(
        "shadowslice_canary_ratio",
        "Part of the requests without a version that a new version answers, from 0 to 1.",
        |model| rollout(model, |rollout| rollout.canary),
    ),
    counter("shadowslice_mirror_copies_total", "Requests that were copied to a new version.", |model| {
        rollout(model, |rollout| rollout.copies.copied as f64)
    }),
    counter(
        "shadowslice_mirror_skipped_total",
        "Requests that were not copied to a new version, because too many copies were in progress.",
        |model| rollout(model, |rollout| rollout.copies.skipped as f64),
    ),
    counter(
        "shadowslice_mirror_compared_total",
        "Answers of a new version that were compared with those of the released version.",
        |model| rollout(model, |rollout| rollout.copies.compared as f64),
    ),
    counter(
        "shadowslice_mirror_differences_total",
        "Answers of a new version that differ from those of the released version.",
        |model| rollout(model, |rollout| rollout.copies.differences as f64),
    ),
];

/// Returns a figure of the new version in a rollout.
fn rollout(model: &ModelMetrics, value: impl Fn(&RolloutStatus) -> f64) -> Vec<MetricSample> {
    let is_it = |rollout: &&RolloutStatus| rollout.candidate == model.status.version;
    one(model.status.rollout.as_ref().filter(is_it).map(value))
}
