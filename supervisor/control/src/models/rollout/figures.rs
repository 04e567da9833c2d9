//! The figures of the two versions of a rollout.

use std::collections::BTreeMap;

use shadowslice_datapath::pipeline::{Metadata, Total};
use shadowslice_datapath::versions::MirrorCounts;
use shadowslice_policy::rollout::{BatchTime, StageCounts, slowdown};

use crate::controller::Served;

/// The figures of a version since its start.
#[derive(Debug, Clone, Default)]
pub(super) struct VersionFigures {
    requests: u64,
    errors: u64,
    late: u64,
    deaths: u64,
    /// The execution of batches by their number of rows.
    execution: BTreeMap<u32, Total>,
    sms: u32,
}

impl VersionFigures {
    pub(super) fn of(served: &Served) -> Self {
        let counts = served.pipeline.report().counts;
        let totals = served.pipeline.totals();
        let report = served.report.borrow();
        Self {
            requests: counts.succeeded + counts.failed + counts.rejected,
            errors: counts.failed,
            late: counts.succeeded.saturating_sub(counts.within_slo) + counts.rejected,
            deaths: report.worker_deaths,
            execution: totals.by_rows.into_iter().map(|(rows, stages)| (rows, stages.infer)).collect(),
            sms: report.sms,
        }
    }

    /// Returns the counts since `before`.
    pub(super) fn since(&self, before: &Self) -> StageCounts {
        StageCounts {
            requests: self.requests.saturating_sub(before.requests),
            errors: self.errors.saturating_sub(before.errors),
            late: self.late.saturating_sub(before.late),
            deaths: self.deaths.saturating_sub(before.deaths),
            ..StageCounts::default()
        }
    }

    fn batches_since(&self, before: &Self) -> Vec<BatchTime> {
        let batch = |(&rows, total): (&u32, &Total)| {
            let earlier = before.execution.get(&rows).copied().unwrap_or_default();
            let count = total.count.saturating_sub(earlier.count);
            (count > 0).then(|| BatchTime { rows, count, time: total.time.saturating_sub(earlier.time) })
        };
        self.execution.iter().filter_map(batch).collect()
    }

    /// Returns how much longer the batches of the new version take than those of the released one on as
    /// many SMs.
    pub(super) fn slowdown(&self, before: &Self, released: &Self, released_before: &Self) -> Option<f64> {
        let ratio = slowdown(&self.batches_since(before), &released.batches_since(released_before))?;
        // As in profiles, a batch on fewer SMs takes longer in proportion at most.
        let fewer = f64::from(released.sms) / f64::from(self.sms.max(1));
        Some(ratio / fewer.max(1.0))
    }
}

/// Adds the comparisons since `before`.
pub(super) fn with_comparisons(
    counts: StageCounts,
    now: &MirrorCounts,
    before: &MirrorCounts,
) -> StageCounts {
    StageCounts {
        compared: now.compared.saturating_sub(before.compared),
        differences: now.differences.saturating_sub(before.differences),
        ..counts
    }
}

/// Returns why requests for the released version do not fit the new one.
pub(super) fn incompatibility(released: &Metadata, candidate: &Metadata) -> Option<String> {
    let tensors = [
        ("inputs", &released.inputs, &candidate.inputs),
        ("optional inputs", &released.optional, &candidate.optional),
        ("outputs", &released.outputs, &candidate.outputs),
    ];
    for (kind, released, candidate) in tensors {
        if released != candidate {
            let show = |specs: &[shadowslice_shared::tensor::TensorSpec]| {
                let spec = |spec: &shadowslice_shared::tensor::TensorSpec| {
                    format!("{} {} {:?}", spec.name, spec.datatype.name(), spec.shape)
                };
                specs.iter().map(spec).collect::<Vec<_>>().join(", ")
            };
            return Some(format!("its {kind} are {} instead of {}", show(candidate), show(released)));
        }
    }
    let streams = |metadata: &Metadata| metadata.streams.is_some();
    match (streams(released), streams(candidate)) {
        (false, true) => Some("it gives many answers to a request instead of one".to_owned()),
        (true, false) => Some("it gives one answer to a request instead of many".to_owned()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use shadowslice_shared::tensor::{Datatype, TensorSpec};

    use super::*;

    fn metadata(outputs: &[(&str, i64)]) -> Metadata {
        let spec = |&(name, axis): &(&str, i64)| TensorSpec {
            name: name.into(),
            datatype: Datatype::Fp32,
            shape: vec![-1, axis],
        };
        Metadata {
            name: "m".into(),
            version: "1".into(),
            platform: "emulated",
            max_batch: 8,
            streams: None,
            inputs: vec![spec(&("x", 4))],
            optional: Vec::new(),
            outputs: outputs.iter().map(spec).collect(),
        }
    }

    #[test]
    fn requests_fit_a_version_with_the_same_tensors_only() {
        let released = metadata(&[("y", 10)]);
        let next = Metadata { version: "2".into(), max_batch: 4, ..released.clone() };
        assert_eq!(incompatibility(&released, &next), None);
        let other = incompatibility(&released, &metadata(&[("y", 12)])).unwrap();
        assert_eq!(other, "its outputs are y FP32 [-1, 12] instead of y FP32 [-1, 10]");
        assert!(incompatibility(&released, &metadata(&[("z", 10)])).is_some());
    }

    #[test]
    fn a_version_on_fewer_sms_may_take_longer_in_proportion() {
        let figures = |ms: u64, sms| VersionFigures {
            execution: BTreeMap::from([(1, Total { count: 10, time: std::time::Duration::from_millis(ms) })]),
            sms,
            ..VersionFigures::default()
        };
        let (before, released) = (VersionFigures::default(), figures(30, 100));
        let slowdown = |ms, sms| figures(ms, sms).slowdown(&before, &released, &before).unwrap();
        assert!((slowdown(90, 100) - 3.0).abs() < 1e-9);
        assert!((slowdown(90, 50) - 1.5).abs() < 1e-9);
        assert!((slowdown(90, 132) - 3.0).abs() < 1e-9, "more SMs excuse nothing, and prove nothing");
    }
}
