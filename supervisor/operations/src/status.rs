//! The data of `shadowslice status`, for the control socket and for scripts.

mod collect;
mod gpus;
mod plan;
mod preemption;
mod rollout;
mod sleep;
mod states;
mod streams;
pub(crate) mod table;
mod tenants;
mod text;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Instant, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

pub(crate) use collect::{of_gpu, of_served, of_unloaded};
pub use gpus::{GpuMemory, NvmlStatus, WorkerStatus};
pub(crate) use gpus::{MIB, notes as notes_of_gpu};
pub(crate) use plan::{plan, why as plan_why};
pub(crate) use preemption::pauses;
pub use preemption::{PreemptedFor, PreemptionStatus};
pub use rollout::{DifferenceStatus, MirrorStatus, RolloutPhase, RolloutStatus, SeenPhase};
pub use sleep::SleepStatus;
pub(crate) use sleep::sleep_note;
pub use streams::StreamStatus;
pub(crate) use streams::streams;
pub use tenants::TenantStatus;
pub(crate) use tenants::of_tenants;
pub(crate) use text::{change_text, in_slo, latency, notes, share, state, supervisor, text};

use shadowslice_control::backend::BackendKind;
use shadowslice_control::controller::{Handovers, Mechanism, ReportedState, VersionRole};
use shadowslice_control::models::Needs;
use shadowslice_control::process::LoadedFiles;
use shadowslice_datapath::pipeline::SmUse;
use shadowslice_datapath::pipeline::{Rates, RequestCounts};
use shadowslice_datapath::readiness::HostState;

/// The status of the supervisor, its models and its GPUs.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct HostStatus {
    /// The supervisor that replies. `None` if the supervisor's version does not send this field.
    pub supervisor: Option<SupervisorStatus>,
    pub host: HostState,
    /// True if the host reports that it is ready.
    pub ready: bool,
    /// True if the next supervisor is starting or already serves.
    pub upgrading: bool,
    /// The models in the order of the configuration. Unloaded models come last.
    pub models: Vec<ModelStatus>,
    pub gpus: Vec<GpuStatus>,
    /// The tenants. The list is empty if there is only the default tenant without limits.
    pub tenants: Vec<TenantStatus>,
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

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GpuStatus {
    /// The index of the GPU in the configuration.
    pub index: usize,
    pub device: String,
    pub uuid: Option<String>,
    /// The mechanism that enforces shares: `emulated`, `mps`, or `none` if shares are not enforced.
    pub backend: BackendKind,
    pub sms: u32,
    /// The SMs times the time since the supervisor's start, in SM·s.
    #[serde(default)]
    pub sm_seconds: f64,
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
#[serde(default)]
pub struct ModelStatus {
    /// The name of the model. A version that is not released has the suffix `:NUMBER`.
    pub name: String,
    /// The name that clients use.
    pub model: String,
    /// The number of the version.
    pub version: u32,
    pub role: VersionRole,
    /// The rollout in progress, or the end of the last one. `None` for versions that have no part in it.
    pub rollout: Option<RolloutStatus>,
    pub state: ReportedState,
    /// The time since the model entered this state, in seconds.
    pub state_age_s: f64,
    /// True if an operator drained the model. A drained model still serves requests.
    pub drained: bool,
    /// The reason why the model is unready, or why its worker cannot start.
    pub why: Option<String>,
    /// The time until the supervisor tries to start an unready model again, in seconds. It is 0
    /// during an attempt. `None` if the model's files or configuration must change first.
    pub next_try_s: Option<f64>,
    pub gpu: usize,
    /// True if the supervisor chose the GPU.
    pub gpu_auto: bool,
    /// The resources that a copy of the model needs on a GPU.
    pub need: Option<NeedStatus>,
    /// The current share, in percent.
    pub share_percent: u32,
    /// The time since the last change of the share, in seconds. `None` if the share has not
    /// changed.
    pub share_age_s: Option<f64>,
    pub sms: u32,
    pub mechanism: Mechanism,
    /// The reason why the share cannot change inside the worker.
    pub no_partition: Option<String>,
    /// The groups of SMs in the worker's partition, for example `0-4`, or `all` for the whole GPU.
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
    pub last_death: Option<String>,
    /// The number of workers that were started to replace a dead worker because no standby was
    /// ready.
    pub worker_restarts: u64,
    pub requests: RequestCounts,
    /// The number of batches answered since the start.
    pub batches: u64,
    /// The sum of the queue waits of all answered requests, in seconds. A queue wait ends when the
    /// request's batch is sent.
    pub queue_wait_s: f64,
    /// The execution time of a batch at the current share, in ms, for each number of rows. The
    /// value is a mean in which recent batches have more weight.
    pub execution_ms: BTreeMap<u32, f64>,
    /// The latencies of requests in the last minute or two, in ms.
    pub latency_ms: Latency,
    pub slo: SloStatus,
    /// The request rates over the last 10 s. `None` if the model does not run.
    pub rates: Option<Rates>,
    /// The reason why no share is sufficient. It is set if more requests arrive than a copy of the
    /// model can answer.
    pub overload: Option<String>,
    /// The reason why the GPU does not have enough memory for a second worker.
    pub cannot_resize: Option<String>,
    /// The files from which the model was loaded. `None` for a model without files, and before the
    /// model is loaded.
    pub loaded: Option<LoadedStatus>,
    /// True if the model's files changed after the model was loaded.
    pub files_changed: bool,
    /// The reason why batches are smaller than the default.
    pub batch_limit: Option<String>,
    /// The description of a batch that has executed for longer than expected.
    pub stalled: Option<String>,
    /// The reason why a standby is missing although the configuration requires one.
    pub no_standby: Option<String>,
    pub handovers: Handovers,
    /// The sleep of the model. `None` if no worker serves.
    pub sleep: Option<SleepStatus>,
    /// The pauses of the model's batches for other models. `None` if no worker serves.
    pub preemption: Option<PreemptionStatus>,
    /// The model's use of the GPU since its start.
    pub sm_use: Option<SmUse>,
    /// The streams. `None` if the model gives one answer per request or no worker serves.
    pub streams: Option<StreamStatus>,
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
    /// Returns the status of a model with one version, for tests.
    #[cfg(test)]
    pub(crate) fn named(name: &str) -> Self {
        Self { name: name.to_owned(), model: name.to_owned(), version: 1, ..Self::default() }
    }

    /// Returns true if the model accepts requests, but has no requests now and got none in the last
    /// minute or two.
    pub fn is_idle(&self) -> bool {
        let offered = self.slo.slack.is_some() || self.slo.attainment.is_none_or(|met| met < 1.0);
        self.queue == 0 && self.in_flight == 0 && !offered
    }
}
