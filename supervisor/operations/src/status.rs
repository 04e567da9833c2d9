//! The content of `shadowslice status`, as it goes over the control socket and to scripts.

mod gpus;
mod plan;
mod states;
pub(crate) mod table;
mod text;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Instant, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use shadowslice_shared::groups::Division;
use shadowslice_shared::units::Timestamp;

pub use gpus::{GpuMemory, NvmlStatus, WorkerStatus};
pub(crate) use gpus::{MIB, notes as notes_of_gpu};
pub use plan::plan;
pub(crate) use plan::why as plan_why;
pub use text::text;
pub(crate) use text::{change_text, in_slo, latency, notes, share, state, supervisor};

use shadowslice_config::ModelConfig;
use shadowslice_control::backend::{BackendStatus, GpuBackend};
use shadowslice_control::controller::{BatchLimit, Handovers, ModelPlan, ModelReport};
use shadowslice_control::models::Needs;
use shadowslice_control::nvml::Watched;
use shadowslice_control::process::LoadedFiles;
use shadowslice_datapath::pipeline::{Counts, Pipeline, PipelineReport, Rates, StalledBatch};
use shadowslice_datapath::readiness::Host;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// `None` if one answers that does not know it yet, as before an upgrade.
    #[serde(default)]
    pub supervisor: Option<SupervisorStatus>,
    #[serde(default)]
    pub host: Host,
    /// What the host says of its readiness.
    #[serde(default)]
    pub ready: bool,
    /// Whether the next supervisor is being started, or serves already.
    #[serde(default)]
    pub upgrading: bool,
    /// As the configuration orders them; unloaded models come last.
    pub models: Vec<ModelStatus>,
    pub gpus: Vec<GpuStatus>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SupervisorStatus {
    pub version: String,
    pub pid: u32,
    /// Since it was started, in seconds.
    pub age_s: f64,
    /// The configuration's file.
    pub config: PathBuf,
}

impl SupervisorStatus {
    /// Of this process.
    pub fn own(since: Instant, config: &Path) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            age_s: since.elapsed().as_secs_f64(),
            config: config.to_owned(),
        }
    }
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
    /// `loading`, `ready`, `restarting`, `unready`, `stopping`, `unloading`, `unloaded` or
    /// `moved`.
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
    /// Whether the supervisor chose the GPU.
    #[serde(default)]
    pub gpu_auto: bool,
    /// What a copy of it takes of a GPU.
    #[serde(default)]
    pub need: Option<NeedStatus>,
    /// The share in force.
    pub share_percent: u32,
    /// Since when; `None` for the share that it was started with.
    #[serde(default)]
    pub share_age_s: Option<f64>,
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
    /// What the last of them died of.
    #[serde(default)]
    pub last_death: Option<String>,
    /// Starts in the place of dead workers where no other worker stood ready.
    pub worker_restarts: u64,
    pub requests: Counts,
    /// Answered since the start.
    pub batches: u64,
    /// All answered requests together, until their batches were sent.
    #[serde(default)]
    pub queue_wait_s: f64,
    /// At the share in force, by rows: a mean that gives recent batches more weight.
    pub execution_ms: BTreeMap<u32, f64>,
    /// Over the last minute or two, from acceptance to answer.
    pub latency_ms: Latency,
    pub slo: SloStatus,
    /// Over the last 10 s; `None` while it does not run.
    #[serde(default)]
    pub rates: Option<Rates>,
    /// Why no share would do, if more requests arrive than a copy answers.
    #[serde(default)]
    pub overload: Option<String>,
    /// There is no memory for a second worker.
    pub cannot_resize: Option<String>,
    /// `None` for a model without files, or one that is not loaded.
    #[serde(default)]
    pub loaded: Option<LoadedStatus>,
    /// The model's files are others than those that it was loaded from.
    #[serde(default)]
    pub files_changed: bool,
    /// Why batches are not as large as the default, where they are not.
    #[serde(default)]
    pub batch_limit: Option<String>,
    /// What is known of a batch that executes for longer than it should.
    #[serde(default)]
    pub stalled: Option<String>,
    /// Why no worker stands ready though one should stand ready.
    pub no_standby: Option<String>,
    pub handovers: Handovers,
}

/// Tells which files a model is served from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LoadedStatus {
    /// As the configuration names it.
    pub path: PathBuf,
    /// Of the model's own file, in hexadecimal digits; `None` until it is computed.
    pub sha256: Option<String>,
    /// When it was loaded, in seconds of Unix time.
    pub at_s: f64,
}

impl LoadedStatus {
    /// Returns `None` for a model without files.
    pub fn of(files: &LoadedFiles) -> Option<Self> {
        let at = files.content.loaded_at?.duration_since(UNIX_EPOCH).unwrap_or_default();
        let sha256 = files.content.sha256.get().cloned();
        Some(Self { path: files.path.clone()?, sha256, at_s: at.as_secs_f64() })
    }
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct NeedStatus {
    /// The fewest SMs that keep the SLO at `rate`; `None` where `why` says what keeps them from being
    /// known.
    pub sms: Option<u32>,
    pub why: Option<String>,
    /// Rows each second that a copy serves within the SLO at most, where more are offered.
    pub most: Option<f64>,
    /// Rows offered each second, over the last minute or two.
    pub rate: f64,
    /// The part of the time in which it would execute on these SMs, 0 to 1.
    pub busy: Option<f64>,
    /// With its weights; as measured, else as its profile says.
    pub memory_mib: Option<u64>,
    /// What a second worker takes beside the first.
    pub shadow_mib: Option<u64>,
    /// The part of the GPU's memory bandwidth, 0 to 1; 0 where no profile says.
    pub bandwidth: f64,
}

impl From<Needs> for NeedStatus {
    fn from(needs: Needs) -> Self {
        let mib = |bytes: u64| bytes.div_ceil(MIB);
        let most = needs.most();
        let (need, why) = match needs.sms {
            Some(Ok(need)) => (Some(need), None),
            Some(Err(unmet)) => (None, Some(unmet.to_string())),
            None => (None, Some("it has no profile, and has not run yet".to_owned())),
        };
        Self {
            sms: need.map(|need| need.sms.0),
            why,
            most,
            rate: needs.rate,
            busy: need.map(|need| need.busy),
            memory_mib: needs.memory.map(mib),
            shadow_mib: needs.shadow.map(mib),
            bandwidth: needs.bandwidth,
        }
    }
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

impl ModelStatus {
    /// It takes requests, has none, and was offered none in the last minute or two.
    pub fn is_idle(&self) -> bool {
        let offered = self.slo.slack.is_some() || self.slo.attainment.is_none_or(|met| met < 1.0);
        self.queue == 0 && self.in_flight == 0 && !offered
    }
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
    model: &ModelConfig,
    pipeline: &Pipeline,
    report: &ModelReport,
    gpus: &[Watched],
    plan: Option<&ModelPlan>,
) -> ModelStatus {
    let seen = pipeline.report();
    let PipelineReport { open, latencies, pending: (queue, in_flight), .. } = seen;
    let slo_ms = model.slo.latency.as_secs_f64() * 1e3;
    let shadow = report.mechanism == "shadow";
    let cannot_resize =
        gpus::no_room(&report.workers, report.memory_need, gpus.get(model.gpu)).filter(|_| shadow);
    let now = Instant::now();
    let changed = report.since != Timestamp::default();
    let (state, why) = states::told(&report.state);
    let why = why.or_else(|| states::progress(report, now));
    let at_most = |limit: &BatchLimit| match limit.max {
        0 => format!("the first axis is not used as a batch: {}", limit.why),
        max => format!("at most {max} rows: {}", limit.why),
    };
    ModelStatus {
        name: model.name.clone(),
        state: state.to_owned(),
        state_age_s: now.saturating_duration_since(report.state_since).as_secs_f64(),
        drained: false,
        why,
        next_try_s: states::next_try(&report.state, now).map(|next| next.as_secs_f64()),
        gpu: model.gpu,
        gpu_auto: model.gpu_auto,
        need: None,
        share_percent: report.share.get(),
        share_age_s: changed.then(|| seen.at.since(report.since).as_secs_f64()),
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
        last_death: report.last_death.clone(),
        worker_restarts: report.worker_restarts,
        requests: seen.counts,
        batches: seen.batches,
        queue_wait_s: seen.queue_wait.as_secs_f64(),
        execution_ms: seen
            .execution
            .into_iter()
            .map(|(rows, took)| (rows, took.as_secs_f64() * 1e3))
            .collect(),
        latency_ms: Latency { p50: latencies.p50_ms, p99: latencies.p99_ms },
        slo: SloStatus {
            latency_ms: slo_ms,
            percentile: model.slo.percentile,
            attainment: open.then_some(latencies.attainment),
            slack: latencies.slo_percentile_ms.filter(|_| open).map(|ms| 1.0 - ms / slo_ms),
        },
        rates: Some(seen.rates),
        overload: None,
        cannot_resize,
        loaded: None,
        files_changed: false,
        batch_limit: report.batch_limit.as_ref().map(at_most),
        stalled: seen.stalled.map(stalled),
        no_standby: report.no_standby.clone(),
        handovers: report.handovers.clone(),
    }
}

fn stalled(batch: StalledBatch) -> String {
    let StalledBatch { requests, executes, left } = batch;
    let requests = if requests == 1 { "1 request".to_owned() } else { format!("{requests} requests") };
    format!(
        "a batch of {requests} has executed for {:.1} s; its worker is replaced in {:.1} s if it goes on",
        executes.as_secs_f64(),
        left.as_secs_f64()
    )
}

pub fn of_unloaded(model: &ModelConfig, why: &str, state: &str) -> ModelStatus {
    ModelStatus {
        name: model.name.clone(),
        state: state.to_owned(),
        why: Some(why.to_owned()),
        gpu: model.gpu,
        gpu_auto: model.gpu_auto,
        slo: SloStatus {
            latency_ms: model.slo.latency.as_secs_f64() * 1e3,
            percentile: model.slo.percentile,
            attainment: None,
            slack: None,
        },
        ..ModelStatus::default()
    }
}
