//! The content of `shadowslice status`, as it goes over the control socket and to scripts.

mod gpus;
mod plan;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use shadowslice_shared::groups::Division;

pub(crate) use gpus::MIB;
pub use gpus::{GpuMemory, NvmlStatus, WorkerStatus};
pub use plan::plan;

use shadowslice_config::Model;
use shadowslice_control::backend::{BackendStatus, GpuBackend};
use shadowslice_control::controller::{Handovers, ModelPlan, ModelReport, ModelState, NextStart};
use shadowslice_control::nvml::Watched;
use shadowslice_datapath::pipeline::{Counts, Pipeline, PipelineReport};
use shadowslice_datapath::readiness::Host;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    #[serde(default)]
    pub host: Host,
    /// What the host says of its readiness.
    #[serde(default)]
    pub ready: bool,
    /// As the configuration orders them; unloaded models come last.
    pub models: Vec<ModelStatus>,
    pub gpus: Vec<GpuStatus>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuStatus {
    /// Its place in the configuration.
    pub index: usize,
    pub device: String,
    pub uuid: Option<String>,
    /// How shares are enforced: `emulated`, `mps`, or `none` if they are not.
    pub backend: String,
    pub sms: u32,
    /// The SMs of each group, of which partitions inside workers are made; `None` without groups.
    #[serde(default)]
    pub groups: Option<Vec<u32>>,
    #[serde(default)]
    pub no_partitions: Option<String>,
    /// While it takes clients.
    pub mps_server_pid: Option<i32>,
    /// Why it takes no workers at the moment.
    pub why: Option<String>,
    /// `None` for an emulated GPU, and where NVML does not know the GPU.
    pub nvml: Option<NvmlStatus>,
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct ModelStatus {
    pub name: String,
    /// `loading`, `ready`, `restarting`, `unready`, `stopping`, `unloading` or `unloaded`.
    pub state: String,
    /// Since when, in seconds.
    #[serde(default)]
    pub state_age_s: f64,
    /// It is to get no more requests, though it serves.
    #[serde(default)]
    pub drained: bool,
    /// Why it is unready, or why its worker cannot be started.
    pub why: Option<String>,
    /// When an unready model is tried again, in seconds; 0 while it is being tried, and `None` where
    /// its files or its configuration must change first.
    #[serde(default)]
    pub next_try_s: Option<f64>,
    pub gpu: usize,
    /// The share in force.
    pub share_percent: u32,
    pub sms: u32,
    /// How the share is changed: `in-process`, `shadow`, `restart` or `never`.
    #[serde(default)]
    pub mechanism: String,
    /// Why not inside the worker, where it is not.
    #[serde(default)]
    pub no_partition: Option<String>,
    /// Of a partition inside the worker: its groups of SMs, as `0-4`; `all` for the whole GPU.
    #[serde(default)]
    pub groups: Option<String>,
    pub held: bool,
    /// `None` where no policy decides, or none has decided yet.
    pub wanted_percent: Option<u32>,
    pub verdict: Option<String>,
    pub queue: usize,
    pub in_flight: usize,
    pub workers: Vec<WorkerStatus>,
    /// Deaths of the worker that served or was to serve, since the start.
    pub worker_deaths: u64,
    /// Starts in the place of dead workers where no other worker stood ready.
    pub worker_restarts: u64,
    pub requests: Counts,
    /// Answered since the start.
    pub batches: u64,
    /// At the share in force, by rows: a mean that gives recent batches more weight.
    pub execution_ms: BTreeMap<u32, f64>,
    /// Over the last minute or two, from acceptance to answer.
    pub latency_ms: Latency,
    pub slo: SloStatus,
    /// There is no memory for a second worker.
    pub cannot_resize: Option<String>,
    /// Why no worker stands ready though one should stand ready.
    pub no_standby: Option<String>,
    pub handovers: Handovers,
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Latency {
    pub p50: f64,
    pub p99: f64,
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct SloStatus {
    pub latency_ms: f64,
    /// The percentage of requests that must meet the latency.
    pub percentile: f64,
    /// Answered within the latency / offered, over the last minute or two; `None` where no requests
    /// are taken.
    pub attainment: Option<f64>,
    /// The part of the SLO's latency that the latency at the percentile leaves, over the same time;
    /// negative where the objective is missed, `None` where also no request was answered.
    pub slack: Option<f64>,
}

pub fn of_gpu(index: usize, gpu: &dyn GpuBackend, watched: &Watched) -> GpuStatus {
    let BackendStatus { device, uuid, backend, sms, mps_server_pid, why } = gpu.status();
    let nvml = watched.reading.as_ref().map(gpus::of_reading);
    let sizes = |division: &Arc<Division>| division.sizes().iter().map(|sms| sms.0).collect();
    let groups = gpu.division().map(sizes).map_err(str::to_owned);
    let (backend, no_partitions) = (backend.to_owned(), groups.as_ref().err().cloned());
    let (sms, groups) = (sms.0, groups.ok());
    GpuStatus { index, device, uuid, backend, sms, groups, no_partitions, mps_server_pid, why, nvml }
}

pub fn of_model(
    model: &Model,
    pipeline: &Pipeline,
    report: &ModelReport,
    gpus: &[Watched],
    plan: Option<&ModelPlan>,
) -> ModelStatus {
    let PipelineReport { open, counts, batches, latencies, pending: (queue, in_flight), execution } =
        pipeline.report();
    let slo_ms = model.slo.latency.as_secs_f64() * 1e3;
    let shadow = report.mechanism == "shadow";
    let cannot_resize =
        gpus::no_room(&report.workers, report.memory_need, gpus.get(model.gpu)).filter(|_| shadow);
    let now = Instant::now();
    let (state, why) = match &report.state {
        ModelState::Loading => ("loading", None),
        ModelState::Ready => ("ready", None),
        ModelState::Restarting => ("restarting", None),
        ModelState::Waiting(why) => ("restarting", Some(why.clone())),
        ModelState::Unready { why, .. } => ("unready", Some(why.clone())),
        ModelState::Stopping => ("stopping", None),
    };
    let next_try = match report.state {
        ModelState::Unready { next: NextStart::UnderWay, .. } => Some(Duration::ZERO),
        ModelState::Unready { next: NextStart::At(at), .. } => Some(at.saturating_duration_since(now)),
        _ => None,
    };
    ModelStatus {
        name: model.name.clone(),
        state: state.to_owned(),
        state_age_s: now.saturating_duration_since(report.state_since).as_secs_f64(),
        drained: false,
        why,
        next_try_s: next_try.map(|next| next.as_secs_f64()),
        gpu: model.gpu,
        share_percent: report.share.get(),
        sms: report.sms,
        mechanism: report.mechanism.to_owned(),
        no_partition: report.no_partition.clone(),
        groups: report.partition.as_ref().map(|(_, groups)| groups.to_string()),
        held: report.held,
        wanted_percent: plan.map(|plan| plan.wanted_percent),
        verdict: plan.map(|plan| plan.why.clone()),
        queue,
        in_flight,
        workers: gpus::of_workers(&report.workers, gpus.get(model.gpu)),
        worker_deaths: report.worker_deaths,
        worker_restarts: report.worker_restarts,
        requests: counts,
        batches,
        execution_ms: execution.into_iter().map(|(rows, took)| (rows, took.as_secs_f64() * 1e3)).collect(),
        latency_ms: Latency { p50: latencies.p50_ms, p99: latencies.p99_ms },
        slo: SloStatus {
            latency_ms: slo_ms,
            percentile: model.slo.percentile,
            attainment: open.then_some(latencies.attainment),
            slack: latencies.slo_percentile_ms.filter(|_| open).map(|ms| 1.0 - ms / slo_ms),
        },
        cannot_resize,
        no_standby: report.no_standby.clone(),
        handovers: report.handovers.clone(),
    }
}

/// `going`: it still answers the requests that it accepted.
pub fn of_unloaded(model: &Model, why: &str, going: bool) -> ModelStatus {
    ModelStatus {
        name: model.name.clone(),
        state: if going { "unloading" } else { "unloaded" }.to_owned(),
        why: Some(why.to_owned()),
        gpu: model.gpu,
        slo: SloStatus {
            latency_ms: model.slo.latency.as_secs_f64() * 1e3,
            percentile: model.slo.percentile,
            attainment: None,
            slack: None,
        },
        ..ModelStatus::default()
    }
}

pub fn table(status: &Status) -> String {
    let mut text = aligned(&COLUMNS, &status.models);
    text.push_str(match status.host {
        Host::Serving if status.ready => "",
        Host::Serving => "the host is not ready\n",
        Host::Drained => "the host is drained, until `shadowslice undrain`\n",
        Host::Stopping => "the host is stopping\n",
    });
    for model in &status.models {
        if model.drained && status.host == Host::Serving {
            text.push_str(&format!("{0} is drained, until `shadowslice undrain {0}`\n", model.name));
        }
        if let Some(why) = &model.why {
            text.push_str(&format!("{} is {}{}: {why}\n", model.name, model.state, next_try(model)));
        }
        if let Some(why) = &model.cannot_resize {
            text.push_str(&format!("{} cannot resize: {why}\n", model.name));
        }
        if let Some(why) = &model.no_standby {
            text.push_str(&format!("{} has no standing worker: {why}\n", model.name));
        }
        if model.held {
            let (name, share) = (&model.name, model.share_percent);
            text.push_str(&format!("{name} is held at {share}%, until `shadowslice release {name}`\n"));
        }
        if let Some(wanted) = model.wanted_percent.filter(|&wanted| wanted != model.share_percent) {
            let verdict = model.verdict.as_deref().unwrap_or("the policy says no more");
            text.push_str(&format!("{}: {wanted}% wanted: {verdict}\n", model.name));
        }
    }
    for gpu in &status.gpus {
        if gpu.backend == "none" {
            text.push_str(&format!("GPU {}: `partition: none`, no share is enforced\n", gpu.device));
        }
        if let Some(why) = &gpu.why {
            text.push_str(&format!("GPU {} takes no workers: {why}\n", gpu.device));
        }
        if let Some(line) = gpus::line(gpu) {
            text.push_str(&line);
            text.push('\n');
        }
    }
    text
}

/// Since when a model is unready, and until when.
fn next_try(model: &ModelStatus) -> String {
    if model.state != "unready" {
        return String::new();
    }
    let next = match model.next_try_s {
        None => "tried again when its files or its configuration change".to_owned(),
        Some(0.0) => "it is being tried again".to_owned(),
        Some(next) => format!("tried again in {next:.0} s"),
    };
    format!(" since {:.0} s ({next})", model.state_age_s)
}

/// A column of a table: its head, and a row's text.
type Column<R> = (&'static str, fn(&R) -> String);

fn aligned<R>(columns: &[Column<R>], rows: &[R]) -> String {
    let mut lines = vec![String::new(); rows.len() + 1];
    for (head, cell) in columns {
        let cells: Vec<_> = std::iter::once((*head).to_owned()).chain(rows.iter().map(cell)).collect();
        let width = cells.iter().map(String::len).max().unwrap_or(0);
        for (line, cell) in lines.iter_mut().zip(cells) {
            line.push_str(&format!("{cell:<width$}  "));
        }
    }
    lines.iter().map(|line| format!("{}\n", line.trim_end())).collect()
}

const COLUMNS: [Column<ModelStatus>; 15] = [
    ("MODEL", |model| model.name.clone()),
    ("STATE", |model| model.state.clone()),
    ("SHARE", |model| format!("{}%", model.share_percent)),
    ("SMS", |model| model.sms.to_string()),
    ("QUEUE", |model| model.queue.to_string()),
    ("IN FLIGHT", |model| model.in_flight.to_string()),
    ("DONE", |model| model.requests.succeeded.to_string()),
    ("FAILED", |model| model.requests.failed.to_string()),
    ("REJECTED", |model| model.requests.rejected.to_string()),
    ("P50 MS", |model| format!("{:.1}", model.latency_ms.p50)),
    ("P99 MS", |model| format!("{:.1}", model.latency_ms.p99)),
    ("SLO MS", |model| format!("{:.1}", model.slo.latency_ms)),
    ("MET", |model| {
        let met = |attainment: f64| format!("{:.2}%", attainment * 100.0);
        model.slo.attainment.map_or("-".to_owned(), met)
    }),
    ("CHANGES", |model| model.handovers.completed.to_string()),
    ("BY", |model| match &model.groups {
        Some(groups) => format!("{} {groups}", model.mechanism),
        None => model.mechanism.clone(),
    }),
];
