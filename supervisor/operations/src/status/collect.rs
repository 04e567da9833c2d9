//! Collects the status of models and GPUs.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use shadowslice_shared::groups::Division;
use shadowslice_shared::units::{Timestamp, ms};

use super::PreemptionStatus;
use super::gpus::{no_room, of_reading, of_workers};
use super::states;
use super::{GpuStatus, Latency, LoadedStatus, ModelStatus, SloStatus, StreamStatus};
use crate::plan::ModelPlan;
use shadowslice_config::{ModelConfig, SloTarget};
use shadowslice_control::backend::GpuBackend;
use shadowslice_control::controller::{
    BatchLimit, Mechanism, ModelReport, ReportedRole, ReportedState, WorkerReport,
};
use shadowslice_control::models::{Needs, Served, Unloaded};
use shadowslice_control::nvml::Reading;
use shadowslice_datapath::pipeline::{Latencies, PipelineReport, StalledBatch};

/// Returns the status of a GPU. `now` is the time since the supervisor's start.
pub(crate) fn of_gpu(
    index: usize,
    gpu: &dyn GpuBackend,
    reading: Option<&Reading>,
    now: Timestamp,
) -> GpuStatus {
    let (facts, server) = (gpu.facts(), gpu.server());
    let sizes = |division: &Arc<Division>| division.sizes().iter().map(|sms| sms.0).collect();
    let groups = facts.division.as_ref().map(sizes);
    GpuStatus {
        index,
        device: facts.device.clone(),
        uuid: facts.uuid.clone(),
        backend: facts.kind,
        sms: facts.sms.0,
        sm_seconds: f64::from(facts.sms.0) * now.since_origin().as_secs_f64(),
        no_partitions: groups.as_ref().err().map(|why| (*why).clone()),
        groups: groups.ok(),
        mps_server_pid: server.as_ref().ok().copied().flatten(),
        why: server.err(),
        nvml: reading.map(of_reading),
    }
}

/// Returns the status of a model that runs. `gpus` are the driver's readings.
pub(crate) fn of_served(served: &Served, gpus: &[Option<Reading>], plan: Option<&ModelPlan>) -> ModelStatus {
    let mut report = served.report.borrow().clone();
    // The next supervisor's worker is shown as a shadow, because it will take over. In the next
    // supervisor's own pipeline, this worker is the incumbent.
    let successor = served.successor.iter().flat_map(|successor| successor.borrow().workers.clone());
    report.workers.extend(successor.map(|worker| match worker.role {
        ReportedRole::Incumbent => WorkerReport { role: ReportedRole::Shadow, ..worker },
        _ => worker,
    }));
    let needs = Needs::of(served, gpus);
    let seen = served.pipeline.report();
    let PipelineReport { open, latencies, rates, .. } = seen;
    let changed = report.since != Timestamp::default();
    ModelStatus {
        share_age_s: changed.then(|| seen.at.since(report.since).as_secs_f64()),
        wanted_percent: plan.map(|plan| plan.wanted_percent),
        verdict: plan.map(|plan| plan.why.clone()),
        queue: seen.queued,
        in_flight: seen.in_flight,
        requests: seen.counts,
        batches: seen.batches,
        queue_wait_s: seen.queue_wait.as_secs_f64(),
        execution_ms: seen.execution.into_iter().map(|(rows, took)| (rows, ms(took))).collect(),
        latency_ms: Latency { p50: latencies.p50_ms, p99: latencies.p99_ms },
        slo: SloStatus::of(&served.model.slo, Some(&latencies).filter(|_| open)),
        rates: Some(rates),
        overload: needs.overload(&rates),
        need: Some(needs.into()),
        loaded: LoadedStatus::of(&served.files),
        files_changed: served.files.changed.load(Ordering::Relaxed),
        stalled: seen.stalled.map(stalled),
        sleep: served.pipeline.sleep_report().map(Into::into),
        sm_use: Some(seen.sm_use),
        streams: seen.streams.map(|streams| StreamStatus::of(&streams, &served.model.slo)),
        preemption: seen.pieces.map(|pieces| PreemptionStatus::of(pieces, &seen.pauses)),
        name: served.shown_name(),
        role: served.role,
        ..of_report(&served.model, &report, gpus.get(served.model.gpu).and_then(Option::as_ref))
    }
}

/// Returns the part of a model's status that its controller reports.
fn of_report(model: &ModelConfig, report: &ModelReport, gpu: Option<&Reading>) -> ModelStatus {
    let now = Instant::now();
    let no_room = no_room(&report.workers, report.memory_need, gpu);
    ModelStatus {
        model: model.served_name().to_owned(),
        version: model.version.number,
        state: ReportedState::from(&report.state),
        state_age_s: now.saturating_duration_since(report.state_since).as_secs_f64(),
        why: states::reason(&report.state).or_else(|| states::progress(report, now)),
        next_try_s: states::next_try(&report.state, now).map(|next| next.as_secs_f64()),
        gpu: model.gpu,
        gpu_auto: model.gpu_auto,
        share_percent: report.share.get(),
        sms: report.sms,
        mechanism: report.mechanism,
        no_partition: report.no_partition.clone(),
        groups: report.partition.as_ref().map(|(_, groups)| groups.to_string()),
        held: report.held,
        workers: of_workers(&report.workers, gpu),
        worker_deaths: report.worker_deaths,
        last_death: report.last_death.clone(),
        worker_restarts: report.worker_restarts,
        cannot_resize: no_room.filter(|_| report.mechanism == Mechanism::Shadow),
        batch_limit: report.batch_limit.as_ref().map(batch_limit),
        no_standby: report.no_standby.clone(),
        handovers: report.handovers.clone(),
        ..ModelStatus::default()
    }
}

pub(crate) fn of_unloaded(unloaded: &Unloaded) -> ModelStatus {
    let model = &unloaded.model;
    ModelStatus {
        name: unloaded.shown_name(),
        role: unloaded.role,
        model: model.served_name().to_owned(),
        version: model.version.number,
        state: unloaded.state(),
        why: Some(unloaded.why.clone()),
        gpu: model.gpu,
        gpu_auto: model.gpu_auto,
        slo: SloStatus::of(&model.slo, None),
        ..ModelStatus::default()
    }
}

impl SloStatus {
    /// Returns the SLO, and how the model met it. `latencies` is `None` while the model accepts no
    /// requests.
    fn of(slo: &SloTarget, latencies: Option<&Latencies>) -> Self {
        let latency_ms = ms(slo.latency);
        let slowest = latencies.and_then(|seen| seen.slo_percentile_ms);
        Self {
            latency_ms,
            percentile: slo.percentile,
            attainment: latencies.map(|seen| seen.traffic.counts.attainment().unwrap_or(1.0)),
            slack: slowest.map(|slowest| 1.0 - slowest / latency_ms),
        }
    }
}

fn batch_limit(limit: &BatchLimit) -> String {
    match limit.max {
        0 => format!("the first axis is not the batch axis: {}", limit.why),
        max => format!("at most {max} rows: {}", limit.why),
    }
}

fn stalled(batch: StalledBatch) -> String {
    let StalledBatch { requests, executes, left } = batch;
    let requests = if requests == 1 { "1 request".to_owned() } else { format!("{requests} requests") };
    format!(
        "a batch of {requests} has executed for {:.1} s; unless it ends, its worker is replaced in {:.1} s",
        executes.as_secs_f64(),
        left.as_secs_f64()
    )
}
