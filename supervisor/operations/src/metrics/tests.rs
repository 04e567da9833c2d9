use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use serde_json::json;

use super::*;
use crate::machine::MachineMemory;
use crate::status::{
    GpuMemory, Latency, LoadedStatus, NvmlStatus, PreemptedFor, PreemptionStatus, SleepStatus, SloStatus,
    StreamStatus, WorkerStatus,
};
use shadowslice_control::controller::*;
use shadowslice_datapath::host_counters::HostCounts;
use shadowslice_datapath::pipeline::{BatchStageTotals, Durations, LatencyHistogram, SmUse, Total};

/// Returns an array of counts that are zero except for the count at index `at`.
const fn only<const N: usize>(count: u64, at: usize) -> [u64; N] {
    let mut counts = [0; N];
    counts[at] = count;
    counts
}

pub(super) const NOTHING: SupervisorMetrics = SupervisorMetrics {
    log_dropped: 0,
    access_log_dropped: Some(DroppedLines { queue_full: 1, unwritten: 2 }),
    request_memory: MemoryReservation { reserved: 1, limit: 2 },
    last_reload: Some(LastReload { at: SystemTime::UNIX_EPOCH, succeeded: false }),
    host: HostCounts {
        connections: 3,
        connections_closed: 4,
        refused: [5, 6, 7],
        http: only(8, 14),
        grpc: only(9, 14),
    },
    peers_refused: 0,
    certificates: Vec::new(),
    tenants: Vec::new(),
    machine: MachineUsage { cpu_busy: None, memory: None },
    process: ProcessUsage {
        cpu_s: None,
        resident: None,
        open_files: None,
        max_open_files: None,
        started: None,
    },
};

pub(super) fn model(name: &str) -> ModelMetrics {
    let requests = serde_json::from_value(json!({
        "accepted": 7, "succeeded": 4, "within_slo": 3, "failed": 2, "rejected": 5,
        "invalid": 3, "refused": {"late": 3, "queue_full": 2}, "retried": 6, "cancelled": 1
    }));
    let status = ModelStatus {
        state: ReportedState::Ready,
        gpu: 1,
        share_percent: 29,
        sms: 38,
        mechanism: Mechanism::InProcess,
        groups: Some("0-4".to_owned()),
        queue: 8,
        in_flight: 9,
        worker_deaths: 10,
        worker_restarts: 5,
        requests: requests.unwrap(),
        execution_ms: BTreeMap::from([(8, 1.5)]),
        latency_ms: Latency { p50: 1.0, p99: 2.0 },
        slo: SloStatus { latency_ms: 20.0, percentile: 99.5, attainment: Some(0.25), slack: None },
        loaded: Some(LoadedStatus {
            path: "/var/lib/models/resnet50/model.onnx".into(),
            sha256: Some("a7937b64b8caa58f03721bb6bacf5c78cb235febe0e70b1b84cd99541461a08e".to_owned()),
            at_s: 2.5,
        }),
        ..ModelStatus::named(name)
    };
    ModelMetrics { status, totals: Totals::default(), changes: Changes::default(), waits: Vec::new() }
}

fn executed(model: &mut ModelMetrics, rows: u32, took: Duration) {
    model.totals.by_rows.entry(rows).or_default().infer.count += 1;
    model.totals.batch_execution.add(took);
}

pub(super) fn policy() -> Planned {
    let (policy, time) = ("static+admission".parse().unwrap(), Duration::from_micros(80));
    Planned { policy, models: Vec::new(), took: Total { count: 1, time } }
}

pub(super) fn has(text: &str, line: &str) {
    assert!(text.lines().any(|found| found == line), "no `{line}` in\n{text}");
}

#[test]
fn models_have_the_figures_of_their_status() {
    let text = render(&[model("m")], None, None, &[], &NOTHING);
    for (name, value) in [
        ("model_ready", "1"),
        ("share_ratio", "0.29"),
        ("share_sms", "38"),
        ("share_held", "0"),
        ("requests_accepted_total", "7"),
        ("requests_within_slo_total", "3"),
        ("requests_retried_total", "6"),
        ("queue_requests", "8"),
        ("in_flight_requests", "9"),
        ("slo_latency_seconds", "0.02"),
        ("slo_target_ratio", "0.995"),
        ("slo_attainment_ratio", "0.25"),
        ("worker_deaths_total", "10"),
        ("worker_restarts_total", "5"),
        ("workers", "0"),
    ] {
        has(&text, &format!("shadowslice_{name}{{model=\"m\",gpu=\"1\"}} {value}"));
    }
    for (outcome, count) in
        [("succeeded", 4), ("failed", 2), ("rejected", 5), ("invalid", 3), ("cancelled", 1)]
    {
        let labels = format!("{{model=\"m\",gpu=\"1\",outcome=\"{outcome}\"}}");
        has(&text, &format!("shadowslice_requests_total{labels} {count}"));
    }
    for (reason, count) in [("late", 3), ("queue_full", 2)] {
        let labels = format!("{{model=\"m\",gpu=\"1\",reason=\"{reason}\"}}");
        has(&text, &format!("shadowslice_requests_refused_total{labels} {count}"));
    }
}

#[test]
fn the_policys_share_and_changes_are_shown_if_there_is_a_policy() {
    let mut model = model("m");
    let text = render(std::slice::from_ref(&model), None, None, &[], &NOTHING);
    assert!(!text.contains("wanted_ratio{") && !text.contains("decision_duration_seconds_"), "{text}");
    (model.status.wanted_percent, model.status.held) = (Some(40), true);
    model.changes.by_hand.completed = 2;
    model.changes.by_policy.refused = 3;
    model.changes.by_hand.effect.add(Duration::from_millis(900));
    let text = render(&[model], Some(&policy()), None, &[], &NOTHING);
    let own = "model=\"m\",gpu=\"1\"";
    has(&text, &format!("shadowslice_share_wanted_ratio{{{own}}} 0.4"));
    has(&text, "shadowslice_log_lines_dropped_total 0");
    has(&text, &format!("shadowslice_share_held{{{own}}} 1"));
    let counted = "shadowslice_repartitions_total";
    has(&text, &format!("{counted}{{{own},cause=\"hand\",outcome=\"completed\"}} 2"));
    has(&text, &format!("{counted}{{{own},cause=\"policy\",outcome=\"refused\"}} 3"));
    has(&text, &format!("shadowslice_handover_effect_seconds_sum{{{own},cause=\"hand\"}} 0.9"));
    has(&text, &format!("shadowslice_handover_effect_seconds_count{{{own},cause=\"hand\"}} 1"));
    has(&text, &format!("shadowslice_handover_stall_seconds_count{{{own}}} 0"));
    has(&text, "shadowslice_decision_duration_seconds_count{policy=\"static+admission\"} 1");
}

#[test]
fn traces_are_counted_if_requests_are_traced() {
    let name = "shadowslice_trace_spans_total{";
    assert!(!render(&[model("m")], None, None, &[], &NOTHING).contains(name));
    let counted = SpanCounts { exported: 5, queue_full: 1, unsent: 2, rejected: 3 };
    let text = render(&[], None, Some(counted), &[], &NOTHING);
    for (outcome, spans) in [("exported", 5), ("queue_full", 1), ("unsent", 2), ("rejected", 3)] {
        has(&text, &format!("{name}outcome=\"{outcome}\"}} {spans}"));
    }
}

#[test]
fn only_a_serving_model_is_ready() {
    for state in
        [ReportedState::Loading, ReportedState::Restarting, ReportedState::Unready, ReportedState::Stopping]
    {
        let mut model = model("m");
        model.status.state = state;
        has(&render(&[model], None, None, &[], &NOTHING), "shadowslice_model_ready{model=\"m\",gpu=\"1\"} 0");
    }
}

fn last_handover() -> HandoverReport {
    HandoverReport {
        outcome: ChangeOutcome::Completed,
        mechanism: Mechanism::Shadow,
        cause: ChangeCause::Hand,
        at_once: false,
        why: None,
        from_percent: 20,
        to_percent: 29,
        from_sms: 26,
        to_sms: 38,
        effect_ms: None,
        stall_us: 12.5,
        stall_total_us: 13.0,
    }
}

#[test]
fn hand_overs_are_counted_by_their_outcomes() {
    let mut model = model("m");
    model.status.handovers = Handovers {
        completed: 3,
        aborted: 2,
        rolled_back: 1,
        in_process: 7,
        flips: 5,
        failovers: 4,
        last: Some(last_handover()),
    };
    let text = render(std::slice::from_ref(&model), None, None, &[], &NOTHING);
    let own = "model=\"m\",gpu=\"1\"";
    has(&text, &format!("shadowslice_handovers_total{{{own},outcome=\"completed\"}} 3"));
    has(&text, &format!("shadowslice_handovers_total{{{own},outcome=\"aborted\"}} 2"));
    has(&text, &format!("shadowslice_handover_rollbacks_total{{{own}}} 1"));
    has(&text, &format!("shadowslice_handover_flips_total{{{own}}} 5"));
    has(&text, &format!("shadowslice_failovers_total{{{own}}} 4"));
}

#[test]
fn a_histogram_has_its_buckets_its_sum_and_its_count() {
    let mut model = model("m");
    for ms in [1, 20, 60_000] {
        model.totals.latency.record(Duration::from_millis(ms));
    }
    let text = render(&[model], None, None, &[], &NOTHING);
    let name = "shadowslice_request_latency_seconds";
    for (bound, count) in
        [("0.0005", 0), ("0.001", 1), ("0.01", 1), ("0.02", 2), ("20", 2), ("60", 3), ("+Inf", 3)]
    {
        has(&text, &format!("{name}_bucket{{model=\"m\",gpu=\"1\",le=\"{bound}\"}} {count}"));
    }
    has(&text, &format!("{name}_sum{{model=\"m\",gpu=\"1\"}} 60.021"));
    has(&text, &format!("{name}_count{{model=\"m\",gpu=\"1\"}} 3"));
}

#[test]
fn a_models_name_cannot_break_out_of_its_quotes() {
    let text = render(&[model("a\"} 9\nb\\n é")], None, None, &[], &NOTHING);
    has(&text, r#"shadowslice_batches_total{model="a\"} 9\nb\\n é",gpu="1"} 0"#);
}

/// Returns a model with a large value for every metric.
fn busy(index: usize, latency: &LatencyHistogram) -> ModelMetrics {
    let mut model = model(&format!("resnet50-v1.5-{index}"));
    let count = 123_456_789;
    let status = &mut model.status;
    status.gpu = index % 8;
    status.wanted_percent = Some(40);
    status.slo.slack = Some(-0.123_456_789_012_345);
    status.slo.attainment = Some(0.987_654_321_098_765);
    status.requests = serde_json::from_value(json!({
        "accepted": count, "succeeded": count, "within_slo": count, "failed": count, "rejected": count,
        "invalid": count, "refused": {"late": count, "queue_full": count}, "retried": count, "cancelled": count
    }))
    .unwrap();
    let roles = [
        ReportedRole::Incumbent,
        ReportedRole::Shadow,
        ReportedRole::Standby,
        ReportedRole::Parked,
        ReportedRole::Reference,
        ReportedRole::Leaving,
    ];
    status.workers = roles.map(|role| worker(role, Some(1234))).into();
    let slept = SleepStatus { sleeps: count, wakes: count, wake_s: 123_456.789, ..SleepStatus::default() };
    status.sleep = Some(SleepStatus { pinned_mib: 12_345, ..slept });
    status.handovers.last = Some(HandoverReport { effect_ms: Some(123.456), ..last_handover() });
    status.sm_use = Some(SmUse { sm_seconds: 123_456_789.123_456, energy_j: Some(12_345_678.901_234) });
    let total = Total { count, time: Duration::from_nanos(123_456_789_123_456) };
    let Changes { by_hand, by_policy, by_worker, stall } = &mut model.changes;
    [by_hand, by_policy, by_worker].into_iter().for_each(|outcomes| outcomes.effect = total);
    *stall = total;
    let paused = PreemptedFor { model: "other".to_owned(), count, total_ms: 1.0, longest_ms: 1.0 };
    // Few models pause for others, and the metrics are absent for the models that never paused.
    let paused = if index == 0 { vec![paused] } else { Vec::new() };
    model.status.preemption = Some(PreemptionStatus { paused, ..PreemptionStatus::default() });
    // Workers rarely wait, and the metric is absent if no worker waits.
    model.waits = if index == 0 { vec![WaitReason::Memory] } else { Vec::new() };
    let by_rows = BTreeMap::from([(8, BatchStageTotals { infer: total, ..BatchStageTotals::default() })]);
    // Few models stream.
    let (stream_gaps, is_streaming) = (latency.clone(), index < 2);
    let streams = StreamStatus { open: 12, attainment: Some(0.987_654), ..StreamStatus::default() };
    model.status.streams = is_streaming.then_some(streams);
    let latency = latency.clone();
    model.totals = Totals {
        receiving: total,
        latency,
        queue_wait: total,
        batch_execution: total,
        by_rows,
        stream_steps: if is_streaming { total } else { Total::default() },
        stream_gaps,
        streams_failed: if is_streaming { count } else { 0 },
        ..model.totals
    };
    model
}

#[test]
fn twenty_models_fill_less_than_225_kb() {
    let mut latency = LatencyHistogram::default();
    (0..1_000_000).for_each(|_| latency.record(Duration::from_nanos(123)));
    let models: Vec<_> = (0..20).map(|index| busy(index, &latency)).collect();
    let own = SupervisorMetrics { access_log_dropped: None, ..NOTHING };
    let text = render(&models, Some(&policy()), None, &[], &own);
    let is_shown = |name: &str| text.contains(&format!("\n{name}"));
    let names = table::MODELS.iter().map(|metric| metric.name);
    let missing: Vec<_> = names.filter(|name| !is_shown(name)).collect();
    assert!(missing.is_empty(), "{missing:?} have no values");
    assert!(text.len() < 225_000, "{} bytes", text.len());
}

fn worker(role: ReportedRole, memory_mib: Option<u64>) -> WorkerStatus {
    let report = WorkerReport {
        shared: None,
        role,
        pid: 7,
        share_percent: 29,
        sms: 38,
        phase: ReportedPhase::Serving,
        restarts: 0,
        boot_ms: Default::default(),
        answer_error: Default::default(),
        memory: memory_mib.map(|mib| WorkerMemory { weights_mib: 400, brought_mib: 0, scratch_mib: mib / 2 }),
    };
    WorkerStatus { report, memory_mib }
}

#[test]
fn workers_of_one_role_share_a_value_and_unknown_memory_has_none() {
    let mut model = model("m");
    let leaving = [
        worker(ReportedRole::Leaving, Some(3)),
        worker(ReportedRole::Leaving, Some(4)),
        worker(ReportedRole::Leaving, None),
    ];
    model.status.workers = Vec::from(leaving);
    model
        .status
        .workers
        .extend([worker(ReportedRole::Incumbent, Some(438)), worker(ReportedRole::Shadow, None)]);
    let text = render(&[model], None, None, &[], &NOTHING);
    let name = "shadowslice_worker_gpu_memory_bytes";
    has(&text, &format!("{name}{{model=\"m\",gpu=\"1\",role=\"leaving\"}} 7340032"));
    has(&text, &format!("{name}{{model=\"m\",gpu=\"1\",role=\"incumbent\"}} 459276288"));
    let name = "shadowslice_model_memory_bytes";
    has(&text, &format!("{name}{{model=\"m\",gpu=\"1\",kind=\"weights\"}} {}", 400 << 20));
    has(&text, &format!("{name}{{model=\"m\",gpu=\"1\",kind=\"scratch\"}} {}", (1 + 2 + 219) << 20));
    assert!(!text.contains("shadow\""), "{text}");
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table of cases")]
fn a_gpu_has_the_readings_of_nvml_and_an_emulated_one_none() {
    let memory = GpuMemory { used_mib: 2, free_mib: 3, total_mib: 6 };
    let mut nvml = NvmlStatus {
        uuid: "GPU-5a7c".to_owned(),
        name: "NVIDIA H200".to_owned(),
        memory: Some(memory),
        utilisation_percent: Some(37),
        power_mw: Some(120_500),
        power_limit_mw: Some(700_000),
        energy_mj: Some(9_000_250),
        xid_errors: 4,
    };
    let gpu = |index, nvml| GpuStatus {
        index,
        device: "0".to_owned(),
        uuid: None,
        backend: shadowslice_control::backend::BackendKind::Mps,
        sms: 132,
        sm_seconds: 1_320.0,
        groups: None,
        no_partitions: None,
        mps_server_pid: None,
        why: None,
        nvml,
    };
    let text = render(&[], None, None, &[gpu(0, None), gpu(1, Some(nvml.clone()))], &NOTHING);
    for (name, value) in
        [("memory_used_bytes", "2097152"), ("memory_total_bytes", "6291456"), ("utilization", "0.37")]
    {
        has(&text, &format!("shadowslice_gpu_{name}{{gpu=\"1\"}} {value}"));
    }
    has(&text, "shadowslice_gpu_xid_errors_total{gpu=\"1\"} 4");
    let emulated: Vec<_> = text.lines().filter(|line| line.contains("gpu=\"0\"")).collect();
    assert_eq!(emulated, ["shadowslice_gpu_sm_seconds_total{gpu=\"0\"} 1320"]);
    for (name, value) in [
        ("gpu_utilization", "0.37"),
        ("gpu_memory_total_bytes", "6291456"),
        ("gpu_memory_used_bytes", "2097152"),
        ("gpu_power_usage", "120.5"),
        ("gpu_power_limit", "700"),
        ("energy_consumption", "9000.25"),
    ] {
        has(&text, &format!("nv_{name}{{gpu_uuid=\"GPU-5a7c\"}} {value}"));
    }
    assert_eq!(text.matches("gpu_uuid=").count(), 6, "{text}");
    (nvml.memory, nvml.utilisation_percent) = (None, None);
    (nvml.power_mw, nvml.power_limit_mw, nvml.energy_mj) = (None, None, None);
    let reload = LastReload { at: SystemTime::UNIX_EPOCH + Duration::from_millis(1_500), succeeded: false };
    let own = SupervisorMetrics { last_reload: Some(reload), ..NOTHING };
    let lost = render(&[], None, None, &[gpu(1, Some(nvml))], &own);
    let values: Vec<_> = lost.lines().filter(|line| !line.starts_with('#')).collect();
    let always = [
        "shadowslice_request_memory_bytes 1",
        "shadowslice_request_memory_limit_bytes 2",
        "shadowslice_log_lines_dropped_total 0",
        "shadowslice_access_log_lines_dropped_total{reason=\"queue_full\"} 1",
        "shadowslice_access_log_lines_dropped_total{reason=\"unwritten\"} 2",
        "shadowslice_peers_refused_total 0",
        "shadowslice_last_reload_timestamp_seconds 1.5",
        "shadowslice_last_reload_success 0",
        "shadowslice_connections 3",
        "shadowslice_connections_closed_total 4",
        "shadowslice_limit_refusals_total{limit=\"in_flight\"} 5",
        "shadowslice_limit_refusals_total{limit=\"memory\"} 6",
        "shadowslice_limit_refusals_total{limit=\"connections\"} 7",
        "shadowslice_responses_total{protocol=\"http\",code=\"503\"} 8",
        "shadowslice_responses_total{protocol=\"grpc\",code=\"14\"} 9",
        concat!("shadowslice_build_info{version=\"", env!("CARGO_PKG_VERSION"), "\"} 1"),
    ];
    let gpu =
        ["shadowslice_gpu_sm_seconds_total{gpu=\"1\"} 1320", "shadowslice_gpu_xid_errors_total{gpu=\"1\"} 4"];
    assert_eq!(values, [&gpu[..], &always].concat());
}

#[test]
fn batches_have_their_sizes_and_times_and_requests_their_wait() {
    let mut model = model("m");
    for (rows, ms) in [(1, 2), (3, 4), (8, 90)] {
        executed(&mut model, rows, Duration::from_millis(ms));
    }
    model.totals.queue_wait.add(Duration::from_micros(160));
    let text = render(&[model], None, None, &[], &NOTHING);
    let own = "model=\"m\",gpu=\"1\"";
    has(&text, &format!("shadowslice_batch_rows_sum{{{own}}} 12"));
    has(&text, &format!("shadowslice_batch_rows_count{{{own}}} 3"));
    has(&text, &format!("shadowslice_batches_total{{{own}}} 3"));
    has(&text, &format!("shadowslice_batch_execution_seconds_sum{{{own}}} 0.096"));
    has(&text, &format!("shadowslice_queue_wait_seconds_sum{{{own}}} 0.00016"));
    has(&text, &format!("shadowslice_queue_wait_seconds_count{{{own}}} 1"));
}

#[test]
fn only_models_that_stream_have_metrics_of_streams() {
    let mut model = model("m");
    let rendered = |model: &ModelMetrics| render(std::slice::from_ref(model), None, None, &[], &NOTHING);
    assert!(!rendered(&model).contains("shadowslice_stream_answer_seconds_count{"));
    model.totals.stream_steps.add(Duration::from_millis(5));
    model.totals.streams_failed = 2;
    let own = "model=\"m\",gpu=\"1\"";
    has(&rendered(&model), &format!("shadowslice_stream_answer_seconds_sum{{{own}}} 0.005"));
    has(&rendered(&model), &format!("shadowslice_streams_failed_total{{{own}}} 2"));
}

#[test]
fn slack_is_shown_after_an_answer_and_can_be_negative() {
    let mut model = model("m");
    let rendered = |model: &ModelMetrics| render(std::slice::from_ref(model), None, None, &[], &NOTHING);
    assert!(!rendered(&model).contains("slack_ratio{"));
    model.status.slo.slack = Some(-0.5);
    has(&rendered(&model), "shadowslice_slo_slack_ratio{model=\"m\",gpu=\"1\"} -0.5");
}

#[test]
fn tritons_metrics_have_the_same_values() {
    let mut model = model("m");
    for rows in [4, 6] {
        executed(&mut model, rows, Duration::ZERO);
    }
    let us = Duration::from_micros;
    model.totals.durations = Durations {
        count: 4,
        request: us(5_000_000_100),
        queue: us(40),
        compute_input: us(3),
        compute_infer: us(50),
        compute_output: Duration::from_nanos(7_900),
    };
    let memory = Some(MachineMemory { total: 4096, used: 1024 });
    let text = render(
        &[model],
        None,
        None,
        &[],
        &SupervisorMetrics { machine: MachineUsage { cpu_busy: Some(0.25), memory }, ..NOTHING },
    );
    for (name, value) in [
        ("request_success", "4"),
        ("count", "10"),
        ("exec_count", "2"),
        ("request_duration_us", "5000000100"),
        ("queue_duration_us", "40"),
        ("compute_input_duration_us", "3"),
        ("compute_infer_duration_us", "50"),
        ("compute_output_duration_us", "7"),
        ("pending_request_count", "8"),
    ] {
        has(&text, &format!("nv_inference_{name}{{model=\"m\",version=\"1\"}} {value}"));
    }
    for (reason, count) in [("REJECTED", 5), ("CANCELED", 1), ("BACKEND", 5), ("OTHER", 0)] {
        let labels = format!("{{model=\"m\",version=\"1\",reason=\"{reason}\"}}");
        has(&text, &format!("nv_inference_request_failure{labels} {count}"));
    }
    has(&text, "nv_cpu_utilization 0.25");
    has(&text, "nv_cpu_memory_total_bytes 4096");
    has(&text, "nv_cpu_memory_used_bytes 1024");
}
