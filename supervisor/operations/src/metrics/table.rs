//! The definitions of the metrics. Users depend on the names.

use std::collections::BTreeMap;

use super::text::{Metric, MetricSample, counter, gauge, histogram, summary};
use super::{Certificate, ModelMetrics, SupervisorMetrics};
use crate::access_log::DroppedLines;
use crate::own_process::ProcessUsage;
use crate::status::{LoadedStatus, MIB, PreemptedFor};
use shadowslice_control::controller::{Changes, Mechanism, Outcomes, Planned, ReportedState, WaitReason};
use shadowslice_datapath::host_counters::{HTTP_CODES, HostCounts, HostLimit};
use shadowslice_datapath::pipeline::{LatencyHistogram, Total};

/// The metrics of models. Each event is counted under only one label, so the values of a metric can
/// be added up.
pub(super) const MODELS: &[Metric<ModelMetrics>] = &[
    gauge(
        "shadowslice_model_ready",
        "1 if the model is ready; 0 while it is loading, restarting, unready or stopping.",
        |model| one(f64::from(model.status.state == ReportedState::Ready)),
    ),
    gauge("shadowslice_model_drained", "1 if an operator drained the model or the host; else 0.", |model| {
        one(f64::from(model.status.drained))
    }),
    gauge("shadowslice_model_asleep", "1 if the model's weights are not on the GPU; else 0.", |model| {
        one(model.status.sleep.is_some().then(|| f64::from(model.status.sleeps())))
    }),
    counter("shadowslice_model_sleeps_total", "Times that the model fell asleep.", |model| {
        one(model.status.sleep.as_ref().map(|sleep| sleep.sleeps as f64))
    }),
    summary(
        "shadowslice_model_wake_seconds",
        "Time of the model's wakes, until its weights were on the GPU.",
        wakes,
    ),
    counter("shadowslice_model_failed_wakes_total", "Wakes that failed.", |model| {
        one(model.status.sleep.as_ref().map(|sleep| sleep.failed_wakes as f64))
    }),
    gauge(
        "shadowslice_model_pinned_bytes",
        "Pinned host memory in which the model's weights wait while it sleeps.",
        |model| one(model.status.sleep.as_ref().map(|sleep| (sleep.pinned_mib * MIB) as f64)),
    ),
    counter(
        "shadowslice_model_preemptions_total",
        "Pauses of the model's batches for batches of other models, by the other model.",
        |model| preemptions(model, |paused| paused.count as f64),
    ),
    counter(
        "shadowslice_model_preempted_seconds_total",
        "Time for which the model's batches paused for batches of other models, by the other model.",
        |model| preemptions(model, |paused| paused.total_ms / 1e3),
    ),
    counter(
        "shadowslice_model_sm_seconds_total",
        "SM time of the model's batches, in SM-seconds. Batches on the same SMs divide them.",
        |model| one(model.status.sm_use.map(|used| used.sm_seconds)),
    ),
    counter(
        "shadowslice_model_energy_joules_total",
        "Energy of the GPU in proportion to the model's SM time. The part of idle SMs belongs to no model.",
        |model| one(model.status.sm_use.and_then(|used| used.energy_j)),
    ),
    gauge(
        "shadowslice_model_files_changed",
        "1 if the model's files have changed since it was loaded, until a reload; else 0.",
        |model| one(f64::from(model.status.files_changed)),
    ),
    gauge(
        "shadowslice_model_loaded_timestamp_seconds",
        "Time at which the model was loaded, in seconds of Unix time, by its path and the first digits of its SHA-256.",
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
        |model| one(f64::from(model.status.mechanism == Mechanism::InProcess)),
    ),
    counter("shadowslice_requests_accepted_total", "Requests accepted into the queue.", |model| {
        one(model.status.requests.accepted as f64)
    }),
    counter("shadowslice_requests_total", "Requests that ended, by outcome.", outcomes),
    counter("shadowslice_requests_refused_total", "Requests refused, by reason.", refusals),
    counter("shadowslice_requests_within_slo_total", "Requests answered within the SLO.", |model| {
        one(model.status.requests.within_slo as f64)
    }),
    counter(
        "shadowslice_requests_retried_total",
        "Retries of requests: after a worker's death, when draining took too long, or alone after their \
         batch failed.",
        |model| one(model.status.requests.retried as f64),
    ),
    gauge("shadowslice_queue_requests", "Requests in the queue.", |model| one(model.status.queue as f64)),
    gauge("shadowslice_in_flight_requests", "Requests that workers are processing.", |model| {
        one(model.status.in_flight as f64)
    }),
    counter("shadowslice_batches_total", "Batches answered.", |model| {
        one(model.totals.batch_execution.count as f64)
    }),
    summary("shadowslice_batch_rows", "Rows of batches answered.", rows),
    summary(
        "shadowslice_batch_execution_seconds",
        "Execution time of answered batches, as reported by the workers.",
        |model| total(&model.totals.batch_execution),
    ),
    summary(
        "shadowslice_stream_answer_seconds",
        "Execution time of steps, which compute the next answers of streams, as reported by the workers.",
        |model| streamed(model, total(&model.totals.stream_steps)),
    ),
    histogram(
        "shadowslice_stream_gap_seconds",
        "Time of each answer in a stream after the first one, from the request for it.",
        |model| streamed(model, latencies(&model.totals.stream_gaps)),
    ),
    gauge("shadowslice_streams_open", "Open streams.", |model| {
        one(model.status.streams.as_ref().map(|streams| f64::from(streams.open)))
    }),
    gauge(
        "shadowslice_stream_gap_attainment_ratio",
        "Answers in streams within the SLO of the next answer / all, over the last minute or two; absent \
         without `slo.next`.",
        |model| one(model.status.streams.as_ref().and_then(|streams| streams.attainment)),
    ),
    counter("shadowslice_streams_failed_total", "Streams that failed after their first answer.", |model| {
        streamed(model, one(model.totals.streams_failed as f64))
    }),
    summary(
        "shadowslice_request_receive_seconds",
        "Time to receive requests, from their head to their end.",
        |model| total(&model.totals.receiving),
    ),
    summary(
        "shadowslice_queue_wait_seconds",
        "Queue wait of answered requests, from their end to the sending of their batch.",
        |model| total(&model.totals.queue_wait),
    ),
    histogram(
        "shadowslice_request_latency_seconds",
        "Latency of answered requests, from their first byte to the last byte of the answer.",
        |model| latencies(&model.totals.latency),
    ),
    summary(
        "shadowslice_answer_write_seconds",
        "Time to write answers, from the worker's answer until the client's socket has accepted all of it.",
        |model| total(&model.totals.writing),
    ),
    gauge("shadowslice_slo_latency_seconds", "Latency of the SLO.", |model| {
        one(model.status.slo.latency_ms / 1e3)
    }),
    gauge(
        "shadowslice_slo_target_ratio",
        "Part of the requests that must meet the SLO's latency, from 0 to 1.",
        |model| one(model.status.slo.percentile / 100.0),
    ),
    gauge(
        "shadowslice_slo_attainment_ratio",
        "Requests answered within the SLO / requests offered, over the last minute or two; 1 without requests, \
         absent while the model accepts no requests.",
        |model| one(model.status.slo.attainment),
    ),
    gauge(
        "shadowslice_slo_slack_ratio",
        "Unused part of the SLO's latency at the SLO's percentile, over the last minute or two; negative \
         if the model violates its SLO.",
        |model| one(model.status.slo.slack),
    ),
    counter("shadowslice_handovers_total", "Hand-overs, by outcome.", |model| {
        let handovers = &model.status.handovers;
        by("outcome", &[("completed", handovers.completed), ("aborted", handovers.aborted)])
    }),
    counter(
        "shadowslice_handover_rollbacks_total",
        "Completed hand-overs that were rolled back during their probation.",
        |model| one(model.status.handovers.rolled_back as f64),
    ),
    counter(
        "shadowslice_handover_in_process_total",
        "Completed changes of share inside the worker, without starting another worker.",
        |model| one(model.status.handovers.in_process as f64),
    ),
    counter("shadowslice_handover_flips_total", "Completed hand-overs to a standby.", |model| {
        one(model.status.handovers.flips as f64)
    }),
    counter("shadowslice_failovers_total", "Times that a standby replaced a worker that died.", |model| {
        one(model.status.handovers.failovers as f64)
    }),
    counter(
        "shadowslice_repartitions_total",
        "Commands to change the share, by cause and outcome.",
        repartitions,
    ),
    summary(
        "shadowslice_handover_effect_seconds",
        "Time from the decision for a hand-over to the first batch at the new share, by cause.",
        |model| by_cause(&causes(model), |outcomes| &outcomes.effect),
    ),
    summary("shadowslice_handover_stall_seconds", "Longest stall of each completed hand-over.", |model| {
        total(&model.changes.stall)
    }),
    gauge(
        "shadowslice_workers",
        "Running worker processes, including shadows, standbys and parked workers.",
        |model| one(model.status.workers.len() as f64),
    ),
    gauge(
        "shadowslice_workers_waiting",
        "Workers whose start waits, by the awaited resource: GPU memory, the MPS server, or their turn; \
         absent while none waits.",
        waiting,
    ),
    counter(
        "shadowslice_worker_deaths_total",
        "Deaths of workers that served or were about to serve, and failures to start one.",
        |model| one(model.status.worker_deaths as f64),
    ),
    counter(
        "shadowslice_worker_restarts_total",
        "Workers started to replace one that died, when no standby was ready or about to be.",
        |model| one(model.status.worker_restarts as f64),
    ),
    gauge(
        "shadowslice_worker_gpu_memory_bytes",
        "GPU memory of the model's workers on a real GPU, by role, to the MiB.",
        gpu_memory,
    ),
    gauge(
        "shadowslice_model_memory_bytes",
        "GPU memory by kind, also on emulated GPUs: weights, once for all workers, and scratch of all workers.",
        memory_by_kind,
    ),
];

/// The metrics of the policy. They have no values if no policy decides shares.
pub(super) const POLICY: &[Metric<Planned>] =
    &[summary("shadowslice_decision_duration_seconds", "Time that the policy took to decide.", |policy| {
        total(&policy.took)
    })];

pub(super) const OWN: &[Metric<SupervisorMetrics>] = &[
    gauge("shadowslice_request_memory_bytes", "Memory reserved for requests and answers in flight.", |own| {
        one(own.request_memory.reserved as f64)
    }),
    gauge("shadowslice_request_memory_limit_bytes", "Limit of that memory: limits.memory.", |own| {
        one(own.request_memory.limit as f64)
    }),
    counter(
        "shadowslice_log_lines_dropped_total",
        "Lines of the log that were dropped because its reader was too slow.",
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
        "Connections and calls that were refused because their peer is not listed or has no valid token.",
        |own| one(own.peers_refused as f64),
    ),
    gauge(
        "shadowslice_last_reload_timestamp_seconds",
        "Time at which the configuration was last read, at the start or by a reload, in s since 1970.",
        |own| one(own.last_reload.map(|reload| reload.at_s())),
    ),
    gauge(
        "shadowslice_last_reload_success",
        "1 if all changes of the last reload are in force; 0 if it failed.",
        |own| one(own.last_reload.map(|reload| f64::from(reload.succeeded))),
    ),
];

pub(super) const CERTIFICATES: &[Metric<Certificate>] = &[gauge(
    "shadowslice_certificate_expiry_timestamp_seconds",
    "Time at which the first certificate in a file of `tls` expires, in s since 1970.",
    |certificate| one(certificate.expires as f64),
)];

/// The metrics of the connections and responses of all clients.
pub(super) const HOST: &[Metric<HostCounts>] = &[
    gauge("shadowslice_connections", "Open connections for requests.", |host| one(host.connections as f64)),
    counter(
        "shadowslice_connections_closed_total",
        "Idle connections that were closed to make room for others: limits.connections.",
        |host| one(host.connections_closed as f64),
    ),
    counter(
        "shadowslice_limit_refusals_total",
        "Requests that a limit of the host refused, by the limit.",
        |host| by("limit", &HostLimit::ALL.map(|limit| (limit.name(), host.refused[limit as usize]))),
    ),
    counter(
        "shadowslice_responses_total",
        "Responses to clients, by protocol and status code; codes without responses are left out.",
        |host| {
            let codes = HTTP_CODES.iter().map(u16::to_string).chain(["other".to_owned()]);
            let http = codes.zip(host.http).map(|(code, count)| ("http", code, count));
            let grpc = host.grpc.iter().enumerate().map(|(code, &count)| ("grpc", code.to_string(), count));
            let sample = |(protocol, code, count): (&str, String, u64)| MetricSample {
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

/// The metrics of the process, under the standard names of Prometheus clients.
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
        gauge("process_max_fds", "Limit of file descriptors of the supervisor.", |own| {
            one(own.max_open_files.map(|count| count as f64))
        }),
        gauge("process_start_time_seconds", "Start time of the supervisor, in s since 1970.", |own| {
            one(own.started)
        }),
    ];

pub(super) const TRACES: &[Metric<(&str, u64)>] = &[counter(
    "shadowslice_trace_spans_total",
    "Spans of traced requests, by outcome: exported, or dropped because the queue was full, \
         unsent, or rejected.",
    |(_, spans)| one(*spans as f64),
)];

/// Returns the outcomes of changes of the share by cause: an operator, a worker or the policy.
fn causes(model: &ModelMetrics) -> [(&'static str, &Outcomes); 3] {
    let Changes { by_hand, by_policy, by_worker, .. } = &model.changes;
    [("hand", by_hand), ("worker", by_worker), ("policy", by_policy)]
}

fn repartitions(model: &ModelMetrics) -> Vec<MetricSample> {
    let of = |(cause, outcomes): (&str, &Outcomes)| {
        let Outcomes { completed, aborted, refused, .. } = *outcomes;
        let counts = [("completed", completed), ("aborted", aborted), ("refused", refused)];
        with_cause(cause, by("outcome", &counts))
    };
    causes(model).into_iter().flat_map(of).collect()
}

fn by_cause(causes: &[(&'static str, &Outcomes)], of: impl Fn(&Outcomes) -> &Total) -> Vec<MetricSample> {
    causes.iter().flat_map(|(cause, outcomes)| with_cause(cause, total(of(outcomes)))).collect()
}

fn with_cause(cause: &str, mut samples: Vec<MetricSample>) -> Vec<MetricSample> {
    samples.iter_mut().for_each(|sample| sample.labels.insert(0, ("cause", cause.to_owned())));
    samples
}

fn waiting(model: &ModelMetrics) -> Vec<MetricSample> {
    let count = |reason| model.waits.iter().filter(|wait| **wait == reason).count() as u64;
    let reasons = [
        ("memory", WaitReason::Memory),
        ("mps", WaitReason::Mps),
        ("client", WaitReason::Client),
        ("turn", WaitReason::Turn),
    ];
    let counts = reasons.map(|(name, reason)| (name, count(reason)));
    by("reason", &counts.into_iter().filter(|(_, count)| *count > 0).collect::<Vec<_>>())
}

/// Returns the sum of the workers' memory for each role. Workers whose memory is unknown are
/// omitted, because the value 0 would be wrong.
fn gpu_memory(model: &ModelMetrics) -> Vec<MetricSample> {
    let mut by_role = BTreeMap::<String, u64>::new();
    for worker in &model.status.workers {
        if let Some(mib) = worker.memory_mib {
            *by_role.entry(worker.report.role.to_string()).or_default() += mib * MIB;
        }
    }
    by("role", &by_role.iter().map(|(role, bytes)| (role.as_str(), *bytes)).collect::<Vec<_>>())
}

fn memory_by_kind(model: &ModelMetrics) -> Vec<MetricSample> {
    let kinds = || model.status.workers.iter().filter_map(|worker| worker.report.memory);
    let Some(weights) = kinds().map(|memory| memory.weights_mib).max() else { return Vec::new() };
    let scratch = kinds().map(|memory| memory.scratch_mib).sum::<u64>();
    by("kind", &[("weights", weights * MIB), ("scratch", scratch * MIB)])
}

fn outcomes(model: &ModelMetrics) -> Vec<MetricSample> {
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

fn preemptions(model: &ModelMetrics, value: impl Fn(&PreemptedFor) -> f64) -> Vec<MetricSample> {
    let paused = model.status.preemption.iter().flat_map(|preemption| &preemption.paused);
    let sample = |paused: &PreemptedFor| {
        let labels = vec![("for", paused.model.clone())];
        MetricSample { suffix: "", labels, value: value(paused) }
    };
    paused.map(sample).collect()
}

fn refusals(model: &ModelMetrics) -> Vec<MetricSample> {
    by("reason", &model.status.requests.refused.by_reason().collect::<Vec<_>>())
}

pub(super) fn one(value: impl Into<Option<f64>>) -> Vec<MetricSample> {
    value.into().map(|value| MetricSample { suffix: "", labels: Vec::new(), value }).into_iter().collect()
}

pub(super) fn by(label: &'static str, counts: &[(&str, u64)]) -> Vec<MetricSample> {
    let sample = |(of, count): &(&str, u64)| MetricSample {
        suffix: "",
        labels: vec![(label, (*of).to_owned())],
        value: *count as f64,
    };
    counts.iter().map(sample).collect()
}

/// The number of digits of a file's SHA-256 in a label. This number is large enough to distinguish
/// versions of a file.
const SHA256_DIGITS: usize = 16;

fn loaded(loaded: &LoadedStatus) -> MetricSample {
    let path = ("path", loaded.path.display().to_string());
    let sha256 = loaded.sha256.as_deref().unwrap_or_default();
    let sha256 = ("sha256", sha256.chars().take(SHA256_DIGITS).collect());
    MetricSample { suffix: "", labels: vec![path, sha256], value: loaded.at_s }
}

fn latencies(latency: &LatencyHistogram) -> Vec<MetricSample> {
    let bounded = latency.cumulative().map(|(bound, count)| (bound.as_secs_f64().to_string(), count));
    let bucket = |(bound, count): (String, u64)| MetricSample {
        suffix: "_bucket",
        labels: vec![("le", bound)],
        value: count as f64,
    };
    let all = bounded.chain([("+Inf".to_owned(), latency.count())]).map(bucket);
    all.chain(sum_and_count(latency.sum().as_secs_f64(), latency.count())).collect()
}

fn total(of: &Total) -> Vec<MetricSample> {
    sum_and_count(of.time.as_secs_f64(), of.count).into()
}

/// Returns the samples if the model has answered a stream. Returns no samples otherwise.
fn streamed(model: &ModelMetrics, samples: Vec<MetricSample>) -> Vec<MetricSample> {
    let has_streamed = model.totals.stream_steps.count > 0 || model.totals.streams_failed > 0;
    if has_streamed { samples } else { Vec::new() }
}

fn wakes(model: &ModelMetrics) -> Vec<MetricSample> {
    let sleep = model.status.sleep.iter();
    sleep.flat_map(|sleep| sum_and_count(sleep.wake_s, sleep.wakes)).collect()
}

fn rows(model: &ModelMetrics) -> Vec<MetricSample> {
    sum_and_count(batch_rows(model), model.totals.batch_execution.count).into()
}

pub(super) fn batch_rows(model: &ModelMetrics) -> f64 {
    let by_rows = model.totals.by_rows.iter();
    by_rows.map(|(&rows, steps)| u64::from(rows) * steps.infer.count).sum::<u64>() as f64
}

fn sum_and_count(sum: f64, count: u64) -> [MetricSample; 2] {
    let sample = |suffix, value| MetricSample { suffix, labels: Vec::new(), value };
    [sample("_sum", sum), sample("_count", count as f64)]
}
