//! The metrics: their names, which users hold on to, and where they come from.

use std::collections::BTreeMap;

use super::text::{Metric, Sample, counter, gauge, histogram, summary};
use super::{Certificate, ModelMetrics, Own, Policy};
use crate::access_log::DroppedLines;
use crate::own_process::ProcessUsage;
use crate::status::{LoadedStatus, MIB};
use shadowslice_control::controller::{Changes, Outcomes, WaitReason};
use shadowslice_datapath::pipeline::{LatencyHistogram, Total};
use shadowslice_datapath::tally::{HTTP_CODES, HostCounts, HostLimit};

/// Values of one metric may be added up: no event is counted under two labels.
pub(super) const MODELS: &[Metric<ModelMetrics>] = &[
    gauge(
        "shadowslice_model_ready",
        "1 if the model serves; 0 while it is loading, restarting, unready or stopping.",
        |model| one(f64::from(model.status.state == "ready")),
    ),
    gauge("shadowslice_model_drained", "1 if an operator drained the model or the host; else 0.", |model| {
        one(f64::from(model.status.drained))
    }),
    gauge(
        "shadowslice_model_files_changed",
        "1 if the model's files have changed since it was loaded, until a reload; else 0.",
        |model| one(f64::from(model.status.files_changed)),
    ),
    gauge(
        "shadowslice_model_loaded_timestamp_seconds",
        "When the model was loaded, in seconds of Unix time, by its path and the first digits of its SHA-256.",
        |model| model.status.loaded.iter().map(loaded).collect(),
    ),
    gauge("shadowslice_share_ratio", "Share of the GPU's SMs in force, from 0 to 1.", |model| {
        one(f64::from(model.status.share_percent) / 100.0)
    }),
    gauge("shadowslice_share_sms", "SMs of the share in force.", |model| one(f64::from(model.status.sms))),
    gauge("shadowslice_share_wanted_ratio", "Share that the policy wants, from 0 to 1.", |model| {
        one(model.status.wanted_percent.map(|percent| f64::from(percent) / 100.0))
    }),
    gauge(
        "shadowslice_share_held",
        "1 if an operator holds the share, so that the policy does not change it; else 0.",
        |model| one(f64::from(model.status.held)),
    ),
    gauge(
        "shadowslice_share_in_process",
        "1 if the share is a partition inside the worker, which changes between two batches; else 0.",
        |model| one(f64::from(model.status.mechanism == "in-process")),
    ),
    counter("shadowslice_requests_accepted_total", "Requests taken into the queue.", |model| {
        one(model.status.requests.accepted as f64)
    }),
    counter("shadowslice_requests_total", "Requests that came to an end, by outcome.", outcomes),
    counter("shadowslice_requests_refused_total", "Requests turned away, by reason.", refusals),
    counter("shadowslice_requests_within_slo_total", "Requests answered within the SLO.", |model| {
        one(model.status.requests.within_slo as f64)
    }),
    counter(
        "shadowslice_requests_retried_total",
        "Times that requests were put back into the queue after a worker's death, when draining \
         took too long, or to be tried alone after their batch failed.",
        |model| one(model.status.requests.retried as f64),
    ),
    gauge("shadowslice_queue_requests", "Requests that wait.", |model| one(model.status.queue as f64)),
    gauge("shadowslice_in_flight_requests", "Requests that the workers have.", |model| {
        one(model.status.in_flight as f64)
    }),
    counter("shadowslice_batches_total", "Batches answered.", |model| {
        one(model.totals.batch_execution.count as f64)
    }),
    summary("shadowslice_batch_rows", "Rows of batches answered.", rows),
    summary(
        "shadowslice_batch_execution_seconds",
        "Execution of batches answered, as their workers reported it.",
        |model| total(&model.totals.batch_execution),
    ),
    summary(
        "shadowslice_stream_answer_seconds",
        "Execution of answers after the first of their stream, as their workers reported it.",
        |model| streamed(model, total(&model.totals.stream_steps)),
    ),
    counter(
        "shadowslice_streams_failed_total",
        "Streams that broke off after their first answer.",
        |model| streamed(model, one(model.totals.streams_failed as f64)),
    ),
    summary(
        "shadowslice_request_receive_seconds",
        "How long requests took to come, from their head to their end.",
        |model| total(&model.totals.coming),
    ),
    summary(
        "shadowslice_queue_wait_seconds",
        "Wait of answered requests, from their end to the sending of their batch.",
        |model| total(&model.totals.queue_wait),
    ),
    histogram(
        "shadowslice_request_latency_seconds",
        "Latency of answered requests, from their first byte to the last byte of the answer.",
        |model| latencies(&model.totals.latency),
    ),
    summary(
        "shadowslice_answer_write_seconds",
        "From a worker's answer until the client's socket has all of it.",
        |model| total(&model.totals.writing),
    ),
    gauge("shadowslice_slo_latency_seconds", "Latency that the SLO promises.", |model| {
        one(model.status.slo.latency_ms / 1e3)
    }),
    gauge(
        "shadowslice_slo_target_ratio",
        "Part of the requests that must meet the SLO's latency, from 0 to 1.",
        |model| one(model.status.slo.percentile / 100.0),
    ),
    gauge(
        "shadowslice_slo_attainment_ratio",
        "Answered within the SLO / offered, over the last minute or two; 1 if nothing was offered, absent \
         while the model takes no requests.",
        |model| one(model.status.slo.attainment),
    ),
    gauge(
        "shadowslice_slo_slack_ratio",
        "What the SLO's percentile of latency leaves of the SLO's latency, as a part of it, over \
         the last minute or two; negative where the SLO is missed.",
        |model| one(model.status.slo.slack),
    ),
    counter("shadowslice_handovers_total", "Hand-overs, by outcome.", |model| {
        let handovers = &model.status.handovers;
        by("outcome", &[("completed", handovers.completed), ("aborted", handovers.aborted)])
    }),
    counter(
        "shadowslice_handover_rollbacks_total",
        "Completed hand-overs that were taken back in their probation.",
        |model| one(model.status.handovers.rolled_back as f64),
    ),
    counter(
        "shadowslice_handover_in_process_total",
        "Completed changes of share inside the worker, for which no worker was started.",
        |model| one(model.status.handovers.in_process as f64),
    ),
    counter(
        "shadowslice_handover_flips_total",
        "Completed hand-overs to a worker that stood ready.",
        |model| one(model.status.handovers.flips as f64),
    ),
    counter(
        "shadowslice_failovers_total",
        "Times that a standing worker served in the place of a worker that died.",
        |model| one(model.status.handovers.failovers as f64),
    ),
    counter(
        "shadowslice_repartitions_total",
        "Orders to change the share, by cause and outcome.",
        repartitions,
    ),
    summary(
        "shadowslice_handover_effect_seconds",
        "Effects of hand-overs: from the decision to the first batch at the new share, by cause.",
        |model| by_cause(&causes(model), |outcomes| &outcomes.effect),
    ),
    summary("shadowslice_handover_stall_seconds", "Longest stalls of completed hand-overs.", |model| {
        total(&model.changes.stall)
    }),
    gauge(
        "shadowslice_workers",
        "Worker processes that live, shadows, standing and parked ones included.",
        |model| one(model.status.workers.len() as f64),
    ),
    gauge(
        "shadowslice_workers_waiting",
        "Workers that cannot be started for now, by what they wait for: GPU memory, the MPS server, or \
         other workers that start first; absent while none waits.",
        waiting,
    ),
    counter(
        "shadowslice_worker_deaths_total",
        "Deaths of the worker that served or was to serve, and failures to start one.",
        |model| one(model.status.worker_deaths as f64),
    ),
    counter(
        "shadowslice_worker_restarts_total",
        "Workers started in the place of a worker that died, where no other stood ready or was about to.",
        |model| one(model.status.worker_restarts as f64),
    ),
    gauge(
        "shadowslice_worker_gpu_memory_bytes",
        "Memory that the model's workers have on a real GPU, by role, to the MiB.",
        gpu_memory,
    ),
    gauge(
        "shadowslice_model_memory_bytes",
        "GPU memory by kind, emulated too: weights, once for all workers, and scratch of all of them.",
        memory_by_kind,
    ),
];

/// Without values where no policy decides.
pub(super) const POLICY: &[Metric<Policy>] =
    &[summary("shadowslice_decision_duration_seconds", "How long the policy took to decide.", |policy| {
        total(&policy.took)
    })];

pub(super) const OWN: &[Metric<Own>] = &[
    gauge(
        "shadowslice_request_memory_bytes",
        "Memory reserved for requests and answers on their way.",
        |own| one(own.request_memory.0 as f64),
    ),
    gauge("shadowslice_request_memory_limit_bytes", "The most that may be: limits.memory.", |own| {
        one(own.request_memory.1 as f64)
    }),
    counter(
        "shadowslice_log_lines_dropped_total",
        "Lines of the log that were dropped as its reader was too slow.",
        |own| one(own.log_dropped as f64),
    ),
    counter(
        "shadowslice_access_log_lines_dropped_total",
        "Lines of the access log that were dropped, by reason.",
        |own| {
            let dropped = own.access_log_dropped.as_slice().iter();
            let counts = |of: &DroppedLines| [("queue_full", of.queue_full), ("unwritten", of.unwritten)];
            dropped.flat_map(|of| by("reason", &counts(of))).collect()
        },
    ),
    counter(
        "shadowslice_peers_refused_total",
        "Connections and calls that no list lets in, or that have no token.",
        |own| one(own.peers_refused as f64),
    ),
    gauge(
        "shadowslice_last_reload_timestamp_seconds",
        "When the configuration was read last, at the start or by a reload, in s since 1970.",
        |own| one(own.last_reload.map(|(at, _)| at)),
    ),
    gauge(
        "shadowslice_last_reload_success",
        "1 if all changes of the last reload are in force; 0 if it failed.",
        |own| one(own.last_reload.map(|(_, succeeded)| f64::from(succeeded))),
    ),
];

pub(super) const CERTIFICATES: &[Metric<Certificate>] = &[gauge(
    "shadowslice_certificate_expiry_timestamp_seconds",
    "When the first of the certificates in a file of tls expires, in s since 1970.",
    |certificate| one(certificate.expires as f64),
)];

/// What all clients of the host were answered.
pub(super) const HOST: &[Metric<HostCounts>] = &[
    gauge("shadowslice_connections", "Open connections for requests.", |host| one(host.connections as f64)),
    counter(
        "shadowslice_connections_closed_total",
        "Idle connections that were closed because others needed their places: limits.connections.",
        |host| one(host.connections_closed as f64),
    ),
    counter(
        "shadowslice_limit_refusals_total",
        "Requests that a limit of the host refused, by the limit.",
        |host| by("limit", &HostLimit::ALL.map(|limit| (limit.name(), host.refused[limit as usize]))),
    ),
    counter(
        "shadowslice_responses_total",
        "Responses to clients, by protocol and status code; codes that never came are left out.",
        |host| {
            let codes = HTTP_CODES.iter().map(u16::to_string).chain(["other".to_owned()]);
            let http = codes.zip(host.http).map(|(code, count)| ("http", code, count));
            let grpc = host.grpc.iter().enumerate().map(|(code, &count)| ("grpc", code.to_string(), count));
            let sample = |(protocol, code, count): (&str, String, u64)| Sample {
                suffix: "",
                labels: vec![("protocol", protocol.to_owned()), ("code", code)],
                value: count as f64,
            };
            http.chain(grpc).filter(|(_, _, count)| *count > 0).map(sample).collect()
        },
    ),
];

pub(super) const BUILD: &[Metric<()>] =
    &[gauge("shadowslice_build_info", "1, with the version of the supervisor.", |()| one(1.0))];

/// Under the names of Prometheus's own clients.
pub(super) const PROCESS: &[Metric<ProcessUsage>] =
    &[
        counter("process_cpu_seconds_total", "CPU time of the supervisor, without workers.", |own| {
            one(own.cpu_s)
        }),
        gauge("process_resident_memory_bytes", "Resident memory of the supervisor.", |own| {
            one(own.resident.map(|bytes| bytes as f64))
        }),
        gauge("process_open_fds", "Open file descriptors of the supervisor.", |own| {
            one(own.open_files.map(|count| count as f64))
        }),
        gauge("process_max_fds", "The most file descriptors that it may have.", |own| {
            one(own.most_open_files.map(|count| count as f64))
        }),
        gauge("process_start_time_seconds", "When the supervisor started, in s since 1970.", |own| {
            one(own.started)
        }),
    ];

pub(super) const TRACES: &[Metric<(&str, u64)>] = &[counter(
    "shadowslice_trace_spans_total",
    "Spans of traced requests, by outcome: exported, or dropped as the queue was full, \
         unsent, or rejected.",
    |(_, spans)| one(*spans as f64),
)];

/// Orders that answer no change of a load come first.
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

fn by_cause(causes: &[(&'static str, &Outcomes)], of: impl Fn(&Outcomes) -> &Total) -> Vec<Sample> {
    causes.iter().flat_map(|(cause, outcomes)| with_cause(cause, total(of(outcomes)))).collect()
}

fn with_cause(cause: &str, mut samples: Vec<Sample>) -> Vec<Sample> {
    samples.iter_mut().for_each(|sample| sample.labels.insert(0, ("cause", cause.to_owned())));
    samples
}

fn waiting(model: &ModelMetrics) -> Vec<Sample> {
    let count = |reason| model.waits.iter().filter(|wait| **wait == reason).count() as u64;
    let counts = WaitReason::ALL.map(|reason| (reason.name(), count(reason)));
    by("reason", &counts.into_iter().filter(|(_, count)| *count > 0).collect::<Vec<_>>())
}

/// Workers of one role are added up. A worker whose memory is not known has no value, as 0 would be
/// false.
fn gpu_memory(model: &ModelMetrics) -> Vec<Sample> {
    let mut by_role = BTreeMap::new();
    for worker in &model.status.workers {
        if let Some(mib) = worker.memory_mib {
            *by_role.entry(worker.report.role.as_str()).or_default() += mib * MIB;
        }
    }
    by("role", &by_role.into_iter().collect::<Vec<_>>())
}

fn memory_by_kind(model: &ModelMetrics) -> Vec<Sample> {
    let kinds = || model.status.workers.iter().filter_map(|worker| worker.report.memory);
    let Some(weights) = kinds().map(|memory| memory.weights_mib).max() else { return Vec::new() };
    let scratch = kinds().map(|memory| memory.scratch_mib).sum::<u64>();
    by("kind", &[("weights", weights * MIB), ("scratch", scratch * MIB)])
}

fn outcomes(model: &ModelMetrics) -> Vec<Sample> {
    let requests = &model.status.requests;
    let counts = [
        ("succeeded", requests.succeeded),
        ("failed", requests.failed),
        ("rejected", requests.rejected),
        ("invalid", requests.invalid),
        ("cancelled", requests.cancelled),
    ];
    by("outcome", &counts)
}

fn refusals(model: &ModelMetrics) -> Vec<Sample> {
    by("reason", &model.status.requests.refused.by_reason().collect::<Vec<_>>())
}

pub(super) fn one(value: impl Into<Option<f64>>) -> Vec<Sample> {
    value.into().map(|value| Sample { suffix: "", labels: Vec::new(), value }).into_iter().collect()
}

pub(super) fn by(label: &'static str, counts: &[(&str, u64)]) -> Vec<Sample> {
    let sample = |(of, count): &(&str, u64)| Sample {
        suffix: "",
        labels: vec![(label, (*of).to_owned())],
        value: *count as f64,
    };
    counts.iter().map(sample).collect()
}

/// Digits of a file's SHA-256 in a label, enough to tell versions apart.
const DIGITS: usize = 16;

fn loaded(loaded: &LoadedStatus) -> Sample {
    let path = ("path", loaded.path.display().to_string());
    let sha256 = loaded.sha256.as_deref().unwrap_or_default();
    let sha256 = ("sha256", sha256.chars().take(DIGITS).collect());
    Sample { suffix: "", labels: vec![path, sha256], value: loaded.at_s }
}

fn latencies(latency: &LatencyHistogram) -> Vec<Sample> {
    let bounded = latency.cumulative().map(|(bound, count)| (bound.as_secs_f64().to_string(), count));
    let bucket = |(bound, count): (String, u64)| Sample {
        suffix: "_bucket",
        labels: vec![("le", bound)],
        value: count as f64,
    };
    let all = bounded.chain([("+Inf".to_owned(), latency.count())]).map(bucket);
    all.chain(sum_and_count(latency.sum().as_secs_f64(), latency.count())).collect()
}

fn total(of: &Total) -> Vec<Sample> {
    sum_and_count(of.time.as_secs_f64(), of.count).into()
}

/// Nothing of models that have not streamed.
fn streamed(model: &ModelMetrics, samples: Vec<Sample>) -> Vec<Sample> {
    let has_streamed = model.totals.stream_steps.count > 0 || model.totals.streams_failed > 0;
    if has_streamed { samples } else { Vec::new() }
}

fn rows(model: &ModelMetrics) -> Vec<Sample> {
    sum_and_count(batch_rows(model), model.totals.batch_execution.count).into()
}

pub(super) fn batch_rows(model: &ModelMetrics) -> f64 {
    let by_rows = model.totals.by_rows.iter();
    by_rows.map(|(&rows, steps)| u64::from(rows) * steps.infer.count).sum::<u64>() as f64
}

fn sum_and_count(sum: f64, count: u64) -> [Sample; 2] {
    let sample = |suffix, value| Sample { suffix, labels: Vec::new(), value };
    [sample("_sum", sum), sample("_count", count as f64)]
}
