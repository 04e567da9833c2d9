//! The data of `shadowslice status`, for the control socket and for scripts.

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
pub(crate) use plan::{plan, why as plan_why};
pub(crate) use text::{change_text, in_slo, latency, notes, share, state, supervisor, text};

use shadowslice_config::ModelConfig;
use shadowslice_control::backend::{BackendStatus, GpuBackend};
use shadowslice_control::controller::{
    BatchLimit, Handovers, Mechanism, ModelPlan, ModelReport, ReportedState,
};
use shadowslice_control::models::Needs;
use shadowslice_control::nvml::Watched;
use shadowslice_control::process::LoadedFiles;
use shadowslice_datapath::pipeline::{Pipeline, PipelineReport, Rates, RequestCounts, StalledBatch};
use shadowslice_datapath::readiness::HostState;

/// The status of the supervisor, its models and its GPUs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HostStatus {
    /// The supervisor that replies. `None` if the supervisor's version does not send this field.
    #[serde(default)]
    pub supervisor: Option<SupervisorStatus>,
    #[serde(default)]
    pub host: HostState,
    /// True if the host reports that it is ready.
    #[serde(default)]
    pub ready: bool,
    /// True if the next supervisor is starting or already serves.
    #[serde(default)]
    pub upgrading: bool,
    /// The models in the order of the configuration. Unloaded models come last.
    pub models: Vec<ModelStatus>,
    pub gpus: Vec<GpuStatus>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SupervisorStatus {
    pub version: String,
    pub pid: u32,
    /// The time since the supervisor started, in seconds.
    pub age_s: f64,
    /// The path of the configuration file.
    pub config: PathBuf,
}

impl SupervisorStatus {
    /// Returns the description of this process.
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
    /// The index of the GPU in the configuration.
    pub index: usize,
    pub device: String,
    pub uuid: Option<String>,
    /// The mechanism that enforces shares: `emulated`, `mps`, or `none` if shares are not enforced.
    pub backend: String,
    pub sms: u32,
    /// The number of SMs of each group. A partition inside a worker consists of groups. `None` if
    /// the GPU has no groups.
    #[serde(default)]
    pub groups: Option<Vec<u32>>,
    /// The reason why the GPU has no groups.
    #[serde(default)]
    pub no_partitions: Option<String>,
    /// The process id of the MPS server. `None` if the server does not accept clients.
    pub mps_server_pid: Option<i32>,
    /// The reason why the GPU currently accepts no workers.
    pub why: Option<String>,
    /// The readings from NVML. `None` for an emulated GPU, and for a GPU that NVML does not know.
    pub nvml: Option<NvmlStatus>,
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct ModelStatus {
    pub name: String,
    pub state: ReportedState,
    /// The time since the model entered this state, in seconds.
    #[serde(default)]
    pub state_age_s: f64,
    /// True if an operator drained the model. A drained model still serves requests.
    #[serde(default)]
    pub drained: bool,
    /// The reason why the model is unready, or why its worker cannot start.
    pub why: Option<String>,
    /// The time until the supervisor tries to start an unready model again, in seconds. It is 0
    /// during an attempt. `None` if the model's files or configuration must change first.
    #[serde(default)]
    pub next_try_s: Option<f64>,
    pub gpu: usize,
    /// True if the supervisor chose the GPU.
    #[serde(default)]
    pub gpu_auto: bool,
    /// The resources that a copy of the model needs on a GPU.
    #[serde(default)]
    pub need: Option<NeedStatus>,
    /// The current share, in percent.
    pub share_percent: u32,
    /// The time since the last change of the share, in seconds. `None` if the share has not
    /// changed.
    #[serde(default)]
    pub share_age_s: Option<f64>,
    pub sms: u32,
    #[serde(default)]
    pub mechanism: Mechanism,
    /// The reason why the share cannot change inside the worker.
    #[serde(default)]
    pub no_partition: Option<String>,
    /// The groups of SMs in the worker's partition, for example `0-4`, or `all` for the whole GPU.
    #[serde(default)]
    pub groups: Option<String>,
    pub held: bool,
    /// The share that the policy has chosen, in percent. `None` without a policy or before its
    /// first decision.
    pub wanted_percent: Option<u32>,
    /// The policy's reason for the share that it has chosen.
    pub verdict: Option<String>,
    pub queue: usize,
    pub in_flight: usize,
    pub workers: Vec<WorkerStatus>,
    /// The number of workers that died since the start while they served or prepared to serve.
    pub worker_deaths: u64,
    /// The cause of the most recent worker death.
    #[serde(default)]
    pub last_death: Option<String>,
    /// The number of workers that were started to replace a dead worker because no standby was
    /// ready.
    pub worker_restarts: u64,
    pub requests: RequestCounts,
    /// The number of batches answered since the start.
    pub batches: u64,
    /// The sum of the queue waits of all answered requests, in seconds. A queue wait ends when the
    /// request's batch is sent.
    #[serde(default)]
    pub queue_wait_s: f64,
    /// The execution time of a batch at the current share, in ms, for each number of rows. The
    /// value is a mean in which recent batches have more weight.
    pub execution_ms: BTreeMap<u32, f64>,
    /// The latencies of requests in the last minute or two, in ms.
    pub latency_ms: Latency,
    pub slo: SloStatus,
    /// The request rates over the last 10 s. `None` if the model does not run.
    #[serde(default)]
    pub rates: Option<Rates>,
    /// The reason why no share is sufficient. It is set if more requests arrive than a copy of the
    /// model can answer.
    #[serde(default)]
    pub overload: Option<String>,
    /// The reason why the GPU does not have enough memory for a second worker.
    pub cannot_resize: Option<String>,
    /// The files from which the model was loaded. `None` for a model without files, and before the
    /// model is loaded.
    #[serde(default)]
    pub loaded: Option<LoadedStatus>,
    /// True if the model's files changed after the model was loaded.
    #[serde(default)]
    pub files_changed: bool,
    /// The reason why batches are smaller than the default.
    #[serde(default)]
    pub batch_limit: Option<String>,
    /// The description of a batch that has executed for longer than expected.
    #[serde(default)]
    pub stalled: Option<String>,
    /// The reason why a standby is missing although the configuration requires one.
    pub no_standby: Option<String>,
    pub handovers: Handovers,
}

/// The files from which a model was loaded.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LoadedStatus {
    /// The path that the configuration gives.
    pub path: PathBuf,
    /// The SHA-256 of the model's own file in hexadecimal digits. `None` until it has been
    /// computed.
    pub sha256: Option<String>,
    /// The time at which the files were loaded, in seconds since 1970.
    pub at_s: f64,
}

impl LoadedStatus {
    /// Describes the loaded files. Returns `None` for a model without files.
    pub fn of(files: &LoadedFiles) -> Option<Self> {
        let at = files.content.loaded_at?.duration_since(UNIX_EPOCH).unwrap_or_default();
        let sha256 = files.content.sha256.get().cloned();
        Some(Self { path: files.path.clone()?, sha256, at_s: at.as_secs_f64() })
    }
}

/// The resources that a copy of a model needs on a GPU.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct NeedStatus {
    /// The smallest number of SMs that meets the SLO at `rate`. If it is unknown, this is `None`
    /// and `why` contains the reason.
    pub sms: Option<u32>,
    pub why: Option<String>,
    /// The largest number of rows per second that a copy can serve within the SLO. It is set only
    /// if more rows arrive.
    pub most: Option<f64>,
    /// The number of rows per second that arrived in the last minute or two.
    pub rate: f64,
    /// The fraction of the time in which the copy would execute batches on `sms` SMs, from 0 to 1.
    pub busy: Option<f64>,
    /// The memory including weights, in MiB. The value is measured, or comes from the profile.
    pub memory_mib: Option<u64>,
    /// The additional memory that a second worker needs, in MiB.
    pub shadow_mib: Option<u64>,
    /// The fraction of the GPU's memory bandwidth that the copy needs, from 0 to 1. It is 0 for a
    /// model without a profile.
    pub bandwidth: f64,
}

impl From<Needs> for NeedStatus {
    fn from(needs: Needs) -> Self {
        let mib = |bytes: u64| bytes.div_ceil(MIB);
        let most = needs.most();
        let (need, why) = match needs.sms {
            Some(Ok(need)) => (Some(need), None),
            Some(Err(unmet)) => (None, Some(unmet.to_string())),
            None => (None, Some("the model has no profile and has not run yet".to_owned())),
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
    /// The percentage of requests that must be answered within the SLO's latency.
    pub percentile: f64,
    /// The fraction of offered requests that were answered within the SLO's latency in the last
    /// minute or two. `None` while the model accepts no requests.
    pub attainment: Option<f64>,
    /// The unused fraction of the SLO's latency, measured at the SLO's percentile over the same
    /// period. It is negative if the model violates its SLO. `None` while the model accepts no
    /// requests, and if no request was answered.
    pub slack: Option<f64>,
}

impl ModelStatus {
    /// Returns true if the model accepts requests, but has no requests now and got none in the last
    /// minute or two.
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
    let pipeline_report = pipeline.report();
    let PipelineReport { open, latencies, queued: queue, in_flight, .. } = pipeline_report;
    let slo_ms = model.slo.latency.as_secs_f64() * 1e3;
    let shadow = report.mechanism == Mechanism::Shadow;
    let cannot_resize =
        gpus::no_room(&report.workers, report.memory_need, gpus.get(model.gpu)).filter(|_| shadow);
    let now = Instant::now();
    let changed = report.since != Timestamp::default();
    let why = states::reason(&report.state).or_else(|| states::progress(report, now));
    let at_most = |limit: &BatchLimit| match limit.max {
        0 => format!("the first axis is not the batch axis: {}", limit.why),
        max => format!("at most {max} rows: {}", limit.why),
    };
    ModelStatus {
        name: model.name.clone(),
        state: ReportedState::from(&report.state),
        state_age_s: now.saturating_duration_since(report.state_since).as_secs_f64(),
        drained: false,
        why,
        next_try_s: states::next_try(&report.state, now).map(|next| next.as_secs_f64()),
        gpu: model.gpu,
        gpu_auto: model.gpu_auto,
        need: None,
        share_percent: report.share.get(),
        share_age_s: changed.then(|| pipeline_report.at.since(report.since).as_secs_f64()),
        sms: report.sms,
        mechanism: report.mechanism,
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
        requests: pipeline_report.counts,
        batches: pipeline_report.batches,
        queue_wait_s: pipeline_report.queue_wait.as_secs_f64(),
        execution_ms: pipeline_report
            .execution
            .into_iter()
            .map(|(rows, took)| (rows, took.as_secs_f64() * 1e3))
            .collect(),
        latency_ms: Latency { p50: latencies.p50_ms, p99: latencies.p99_ms },
        slo: SloStatus {
            latency_ms: slo_ms,
            percentile: model.slo.percentile,
            attainment: open.then(|| latencies.traffic.counts.attainment().unwrap_or(1.0)),
            slack: latencies.slo_percentile_ms.filter(|_| open).map(|ms| 1.0 - ms / slo_ms),
        },
        rates: Some(pipeline_report.rates),
        overload: None,
        cannot_resize,
        loaded: None,
        files_changed: false,
        batch_limit: report.batch_limit.as_ref().map(at_most),
        stalled: pipeline_report.stalled.map(stalled),
        no_standby: report.no_standby.clone(),
        handovers: report.handovers.clone(),
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

pub fn of_unloaded(model: &ModelConfig, why: &str, state: ReportedState) -> ModelStatus {
    ModelStatus {
        name: model.name.clone(),
        state,
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
