//! The models' statistics, as Triton's clients read them.

use std::time::SystemTime;

use serde_json::{Value, json};

use super::model::VERSION;
use super::proto;
use shadowslice_datapath::pipeline::{Durations, Total, Totals};

/// Where the time of answered requests went, each part with their number.
struct Parts {
    success: Total,
    queue: Total,
    input: Total,
    infer: Total,
    output: Total,
}

impl Parts {
    fn of(sums: &Durations) -> Self {
        let part = |time| Total { count: sums.count, time };
        Self {
            success: part(sums.request),
            queue: part(sums.queue),
            input: part(sums.compute_input),
            infer: part(sums.compute_infer),
            output: part(sums.compute_output),
        }
    }
}

/// For gRPC.
pub(super) fn model(name: &str, totals: &Totals) -> proto::ModelStatistics {
    let parts = Parts::of(&totals.durations);
    let batch_stats = totals.by_rows.iter().map(|(&rows, steps)| proto::InferBatchStatistics {
        batch_size: rows.into(),
        compute_input: duration(steps.input),
        compute_infer: duration(steps.infer),
        compute_output: duration(steps.output),
    });
    proto::ModelStatistics {
        name: name.to_owned(),
        version: VERSION.to_owned(),
        last_inference: last_inference(totals),
        inference_count: totals.rows,
        execution_count: totals.batch_execution.count(),
        inference_stats: Some(proto::InferStatistics {
            success: duration(parts.success),
            fail: duration(totals.fail),
            queue: duration(parts.queue),
            compute_input: duration(parts.input),
            compute_infer: duration(parts.infer),
            compute_output: duration(parts.output),
            cache_hit: duration(Total::default()),
            cache_miss: duration(Total::default()),
        }),
        batch_stats: batch_stats.collect(),
    }
}

/// The same for HTTP.
pub(super) fn model_json(name: &str, totals: &Totals) -> Value {
    let parts = Parts::of(&totals.durations);
    let batch_stats = totals.by_rows.iter().map(|(rows, steps)| {
        json!({
            "batch_size": rows,
            "compute_input": duration_json(steps.input),
            "compute_infer": duration_json(steps.infer),
            "compute_output": duration_json(steps.output),
        })
    });
    json!({
        "name": name,
        "version": VERSION,
        "last_inference": last_inference(totals),
        "inference_count": totals.rows,
        "execution_count": totals.batch_execution.count(),
        "inference_stats": {
            "success": duration_json(parts.success),
            "fail": duration_json(totals.fail),
            "queue": duration_json(parts.queue),
            "compute_input": duration_json(parts.input),
            "compute_infer": duration_json(parts.infer),
            "compute_output": duration_json(parts.output),
            "cache_hit": duration_json(Total::default()),
            "cache_miss": duration_json(Total::default()),
        },
        "batch_stats": batch_stats.collect::<Vec<_>>(),
        "response_stats": {},
        "memory_usage": [],
    })
}

fn duration(total: Total) -> Option<proto::StatisticDuration> {
    Some(proto::StatisticDuration { count: total.count, ns: nanoseconds(total) })
}

fn duration_json(total: Total) -> Value {
    json!({"count": total.count, "ns": nanoseconds(total)})
}

fn nanoseconds(total: Total) -> u64 {
    u64::try_from(total.time.as_nanos()).unwrap_or(u64::MAX)
}

/// Milliseconds since 1970; 0 before the first answer.
fn last_inference(totals: &Totals) -> u64 {
    let since = totals.last.and_then(|last| last.duration_since(SystemTime::UNIX_EPOCH).ok());
    since.map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}
