//! The metrics: their names, which users hold on to, and where they come from.

use std::collections::BTreeMap;

use super::ModelMetrics;
use super::gpus::MIB;
use super::text::MetricType::{Counter, Gauge, Histogram};
use super::text::{Metric, Sample};
use shadowslice_control::controller::{Changes, Outcomes};
use shadowslice_datapath::pipeline::{LatencyHistogram, RowsHistogram};

/// All metrics. Values of one metric may be added up: nothing is counted under two labels.
pub(super) const METRICS: &[Metric<ModelMetrics>] = &[
    Metric {
        name: "shadowslice_model_ready",
        kind: Gauge,
        help: "1 if the model serves; 0 while it is loading, restarting, unready or stopping.",
        samples: |model| one(f64::from(model.status.state == "ready")),
    },
    Metric {
        name: "shadowslice_share_ratio",
        kind: Gauge,
        help: "Share of the GPU's SMs in force, from 0 to 1.",
        samples: |model| one(f64::from(model.status.share_percent) / 100.0),
    },
    Metric {
        name: "shadowslice_share_sms",
        kind: Gauge,
        help: "SMs of the share in force.",
        samples: |model| one(f64::from(model.status.sms)),
    },
    Metric {
        name: "shadowslice_share_wanted_ratio",
        kind: Gauge,
        help: "Share that the policy wants, from 0 to 1.",
        samples: |model| {
            let wanted = model.status.wanted_percent;
            wanted.map_or_else(Vec::new, |percent| one(f64::from(percent) / 100.0))
        },
    },
    Metric {
        name: "shadowslice_share_held",
        kind: Gauge,
        help: "1 if the operator holds the share, so that the policy does not change it; else 0.",
        samples: |model| one(f64::from(model.status.held)),
    },
    Metric {
        name: "shadowslice_share_in_process",
        kind: Gauge,
        help: "1 if the share is a partition inside the worker, which changes between two batches; else 0.",
        samples: |model| one(f64::from(model.status.mechanism == "in-process")),
    },
    Metric {
        name: "shadowslice_requests_accepted_total",
        kind: Counter,
        help: "Requests taken into the queue.",
        samples: |model| one(model.status.requests.accepted as f64),
    },
    Metric {
        name: "shadowslice_requests_total",
        kind: Counter,
        help: "Requests that came to an end, by outcome.",
        samples: outcomes,
    },
    Metric {
        name: "shadowslice_requests_refused_total",
        kind: Counter,
        help: "Requests turned away, by reason.",
        samples: refusals,
    },
    Metric {
        name: "shadowslice_requests_within_slo_total",
        kind: Counter,
        help: "Requests answered within the SLO.",
        samples: |model| one(model.status.requests.within_slo as f64),
    },
    Metric {
        name: "shadowslice_requests_retried_total",
        kind: Counter,
        help: "Times that requests were put back into the queue after a worker's death, when draining took too long, or to be tried alone after their batch failed.",
        samples: |model| one(model.status.requests.retried as f64),
    },
    Metric {
        name: "shadowslice_queue_requests",
        kind: Gauge,
        help: "Requests that wait.",
        samples: |model| one(model.status.queue as f64),
    },
    Metric {
        name: "shadowslice_in_flight_requests",
        kind: Gauge,
        help: "Requests that the workers have.",
        samples: |model| one(model.status.in_flight as f64),
    },
    Metric {
        name: "shadowslice_batches_total",
        kind: Counter,
        help: "Batches answered.",
        samples: |model| one(model.totals.batch_rows.count() as f64),
    },
    Metric {
        name: "shadowslice_batch_rows",
        kind: Histogram,
        help: "Rows of batches answered.",
        samples: |model| rows(&model.totals.batch_rows),
    },
    Metric {
        name: "shadowslice_batch_execution_seconds",
        kind: Histogram,
        help: "Execution of batches answered, as their workers reported it.",
        samples: |model| histogram(&model.totals.batch_execution),
    },
    Metric {
        name: "shadowslice_request_receive_seconds",
        kind: Histogram,
        help: "How long requests took to come, from their head to their end.",
        samples: |model| histogram(&model.totals.coming),
    },
    Metric {
        name: "shadowslice_queue_wait_seconds",
        kind: Histogram,
        help: "Wait of answered requests, from their end to the sending of their batch.",
        samples: |model| histogram(&model.totals.queue_wait),
    },
    Metric {
        name: "shadowslice_request_latency_seconds",
        kind: Histogram,
        help: "Latency of answered requests, from their head to the answer; of the time until their last byte a quarter of the SLO or timeout counts at most.",
        samples: |model| histogram(&model.totals.latency),
    },
    Metric {
        name: "shadowslice_slo_latency_seconds",
        kind: Gauge,
        help: "Latency that the SLO promises.",
        samples: |model| one(model.status.slo.latency_ms / 1e3),
    },
    Metric {
        name: "shadowslice_slo_target_ratio",
        kind: Gauge,
        help: "Part of the requests that must meet the SLO's latency, from 0 to 1.",
        samples: |model| one(model.status.slo.percentile / 100.0),
    },
    Metric {
        name: "shadowslice_slo_attainment_ratio",
        kind: Gauge,
        help: "Answered within the SLO / offered, over the last minute or two; 1 if nothing was offered.",
        samples: |model| one(model.status.slo.attainment),
    },
    Metric {
        name: "shadowslice_slo_slack_ratio",
        kind: Gauge,
        help: "What the SLO's percentile of latency leaves of the SLO's latency, as a part of it, over the last minute or two; negative where the SLO is missed.",
        samples: |model| model.status.slo.slack.map_or_else(Vec::new, one),
    },
    Metric {
        name: "shadowslice_handovers_total",
        kind: Counter,
        help: "Hand-overs, by outcome.",
        samples: |model| {
            let handovers = &model.status.handovers;
            by("outcome", &[("completed", handovers.completed), ("aborted", handovers.aborted)])
        },
    },
    Metric {
        name: "shadowslice_handover_rollbacks_total",
        kind: Counter,
        help: "Completed hand-overs that were taken back in their probation.",
        samples: |model| one(model.status.handovers.rolled_back as f64),
    },
    Metric {
        name: "shadowslice_handover_in_process_total",
        kind: Counter,
        help: "Completed changes of share inside the worker, for which none was started.",
        samples: |model| one(model.status.handovers.in_process as f64),
    },
    Metric {
        name: "shadowslice_handover_flips_total",
        kind: Counter,
        help: "Completed hand-overs to a worker that stood ready.",
        samples: |model| one(model.status.handovers.flips as f64),
    },
    Metric {
        name: "shadowslice_failovers_total",
        kind: Counter,
        help: "Times that a standing worker served in the place of one that died.",
        samples: |model| one(model.status.handovers.failovers as f64),
    },
    Metric {
        name: "shadowslice_repartitions_total",
        kind: Counter,
        help: "Orders to change the share, by who gave them and what became of them.",
        samples: repartitions,
    },
    Metric {
        name: "shadowslice_handover_effect_seconds",
        kind: Histogram,
        help: "Effects of hand-overs: from the decision to the first batch at the new share, by cause.",
        samples: |model| by_cause(&causes(model), |outcomes| &outcomes.effect),
    },
    Metric {
        name: "shadowslice_handover_settle_seconds",
        kind: Histogram,
        help: "From the decision to the first second in which all was answered in time again, by cause.",
        samples: |model| by_cause(&causes(model)[2..], |outcomes| &outcomes.settle),
    },
    Metric {
        name: "shadowslice_handover_stall_seconds",
        kind: Histogram,
        help: "Longest stalls of completed hand-overs.",
        samples: |model| histogram(&model.changes.stall),
    },
    Metric {
        name: "shadowslice_handover_last_stall_seconds",
        kind: Gauge,
        help: "Longest stall of the last hand-over: a batch was ready, a slot free, and no worker took it.",
        samples: |model| {
            let last = model.status.handovers.last.as_ref();
            last.map_or_else(Vec::new, |last| one(last.stall_us / 1e6))
        },
    },
    Metric {
        name: "shadowslice_handover_last_effect_seconds",
        kind: Gauge,
        help: "Effect of the last hand-over: from the decision to the first batch at the new share.",
        samples: |model| {
            let last = model.status.handovers.last.as_ref();
            last.and_then(|last| last.effect_ms).map_or_else(Vec::new, |effect| one(effect / 1e3))
        },
    },
    Metric {
        name: "shadowslice_workers",
        kind: Gauge,
        help: "Worker processes that live, shadows, standing and parked ones included.",
        samples: |model| one(model.status.workers.len() as f64),
    },
    Metric {
        name: "shadowslice_worker_deaths_total",
        kind: Counter,
        help: "Deaths of the worker that served or was to serve, and failures to start one.",
        samples: |model| one(model.status.worker_deaths as f64),
    },
    Metric {
        name: "shadowslice_worker_restarts_total",
        kind: Counter,
        help: "Workers started in the place of one that died, where no other stood ready or was about to.",
        samples: |model| one(model.status.worker_restarts as f64),
    },
    Metric {
        name: "shadowslice_worker_gpu_memory_bytes",
        kind: Gauge,
        help: "Memory that the model's workers have on a real GPU, by role, to the MiB.",
        samples: gpu_memory,
    },
];

/// What became of the orders, by who gave them. Those that answer no change of a load come first.
fn causes(model: &ModelMetrics) -> [(&'static str, &Outcomes); 3] {
    let Changes { by_hand, by_policy, by_worker, .. } = &model.changes;
    [("hand", by_hand), ("worker", by_worker), ("policy", by_policy)]
}

fn repartitions(model: &ModelMetrics) -> Vec<Sample> {
    let of = |(cause, outcomes): (&str, &Outcomes)| {
        let Outcomes { completed, aborted, refused, .. } = *outcomes;
        let counts = [("completed", completed), ("aborted", aborted), ("refused", refused)];
        with_cause(cause, by("outcome", &counts))
    };
    causes(model).into_iter().flat_map(of).collect()
}

fn by_cause(
    causes: &[(&'static str, &Outcomes)],
    of: impl Fn(&Outcomes) -> &LatencyHistogram,
) -> Vec<Sample> {
    causes.iter().flat_map(|(cause, outcomes)| with_cause(cause, histogram(of(outcomes)))).collect()
}

fn with_cause(cause: &str, mut samples: Vec<Sample>) -> Vec<Sample> {
    samples.iter_mut().for_each(|sample| sample.labels.insert(0, ("cause", cause.to_owned())));
    samples
}

/// Workers of one role are added up. None where the memory is not known, for which 0 would be a lie.
fn gpu_memory(model: &ModelMetrics) -> Vec<Sample> {
    let mut by_role = BTreeMap::new();
    for worker in &model.status.workers {
        if let Some(mib) = worker.memory_mib {
            *by_role.entry(worker.standing.role.as_str()).or_default() += mib * MIB;
        }
    }
    by("role", &by_role.into_iter().collect::<Vec<_>>())
}

fn outcomes(model: &ModelMetrics) -> Vec<Sample> {
    let requests = &model.status.requests;
    let counts = [
        ("succeeded", requests.succeeded),
        ("failed", requests.failed),
        ("rejected", requests.rejected),
        ("cancelled", requests.cancelled),
    ];
    by("outcome", &counts)
}

fn refusals(model: &ModelMetrics) -> Vec<Sample> {
    by("reason", &model.status.requests.refused.by_reason().collect::<Vec<_>>())
}

pub(super) fn one(value: f64) -> Vec<Sample> {
    vec![Sample { suffix: "", labels: Vec::new(), value }]
}

pub(super) fn by(label: &'static str, counts: &[(&str, u64)]) -> Vec<Sample> {
    let sample = |(of, count): &(&str, u64)| Sample {
        suffix: "",
        labels: vec![(label, (*of).to_owned())],
        value: *count as f64,
    };
    counts.iter().map(sample).collect()
}

pub(super) fn histogram(latency: &LatencyHistogram) -> Vec<Sample> {
    let bounded = latency.cumulative().map(|(bound, count)| (bound.as_secs_f64().to_string(), count));
    buckets(bounded, latency.count(), latency.sum().as_secs_f64())
}

fn rows(batches: &RowsHistogram) -> Vec<Sample> {
    let bounded = batches.cumulative().map(|(bound, count)| (bound.to_string(), count));
    buckets(bounded, batches.count(), batches.sum() as f64)
}

fn buckets(bounded: impl Iterator<Item = (String, u64)>, count: u64, sum: f64) -> Vec<Sample> {
    let bucket = |(bound, count): (String, u64)| Sample {
        suffix: "_bucket",
        labels: vec![("le", bound)],
        value: count as f64,
    };
    let total = |suffix, value| Sample { suffix, labels: Vec::new(), value };
    let all = bounded.chain([("+Inf".to_owned(), count)]).map(bucket);
    all.chain([total("_sum", sum), total("_count", count as f64)]).collect()
}
