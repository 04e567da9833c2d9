//! The JSON that `shadowslice status`, `resize` and `reload` print, as other programs read it.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Deserialize;
use serde_json::{Map, Value};

/// The output of `shadowslice status --json`.
#[derive(Debug, Clone, Deserialize)]
pub struct StatusJson {
    /// The supervisor that answers.
    pub supervisor: SupervisorJson,
    /// All models.
    pub models: Vec<ModelStatusJson>,
    /// All GPUs.
    pub gpus: Vec<GpuStatusJson>,
}

/// The supervisor process.
#[derive(Debug, Clone, Deserialize)]
pub struct SupervisorJson {
    /// The version of the program.
    pub version: String,
    /// The PID.
    pub pid: i32,
    /// The time since the start, in seconds.
    pub age_s: f64,
    /// The path of the configuration file.
    pub config: PathBuf,
}

/// A GPU.
#[derive(Debug, Clone, Deserialize)]
pub struct GpuStatusJson {
    /// The index in the configuration.
    pub index: usize,
    /// `emulated`, an index or a UUID.
    pub device: String,
    /// The data that NVML reports about the GPU, if any.
    pub nvml: Option<Value>,
    /// `emulated`, `mps` or `none`.
    pub backend: String,
    /// The number of SMs.
    pub sms: u32,
    /// The PID of the MPS server.
    pub mps_server_pid: Option<i32>,
    /// The reason why no workers start on the GPU.
    pub why: Option<String>,
}

/// A model.
#[derive(Debug, Clone, Deserialize)]
pub struct ModelStatusJson {
    /// The name of the model.
    pub name: String,
    /// The state, such as `ready`.
    pub state: String,
    /// The current share, in percent.
    pub share_percent: u32,
    /// The number of SMs of the share.
    pub sms: u32,
    /// The way in which the share changes: `in-process`, `shadow`, `restart` or `never`.
    #[serde(default)]
    pub mechanism: String,
    /// The groups of SMs of the partition inside the worker.
    pub groups: Option<String>,
    /// The worker processes.
    pub workers: Vec<WorkerStatusJson>,
    /// The numbers of requests by outcome.
    pub requests: RequestCountsJson,
    /// The service level objective.
    pub slo: SloStatusJson,
    /// The hand-overs so far.
    pub handovers: HandoverCountsJson,
    /// All further keys.
    #[serde(flatten)]
    pub more: Map<String, Value>,
}

/// A worker process.
#[derive(Debug, Clone, Deserialize)]
pub struct WorkerStatusJson {
    /// The role, such as `incumbent` or `shadow`.
    pub role: String,
    /// The PID.
    pub pid: i32,
    /// The number of SMs.
    pub sms: u32,
    /// The memory on a real GPU, in MiB.
    pub memory_mib: Option<u64>,
    /// All further keys.
    #[serde(flatten)]
    pub more: Map<String, Value>,
}

/// The numbers of requests by outcome.
#[derive(Debug, Clone, Deserialize)]
pub struct RequestCountsJson {
    /// Requests accepted into the queue.
    pub accepted: u64,
    /// Requests answered without an error.
    pub succeeded: u64,
    /// Requests answered with an error.
    pub failed: u64,
    /// Requests refused on arrival or while queued.
    pub rejected: u64,
    /// Invalid requests.
    pub invalid: u64,
    /// The refused requests by reason.
    pub refused: BTreeMap<String, u64>,
    /// Requests executed again after a worker died.
    pub retried: u64,
    /// Requests whose client left before the end of the response.
    pub cancelled: u64,
}

/// A service level objective.
#[derive(Debug, Clone, Deserialize)]
pub struct SloStatusJson {
    /// The latency bound, in milliseconds.
    pub latency_ms: f64,
    /// The fraction of recent requests within the bound; `None` while there are no requests.
    pub attainment: Option<f64>,
}

/// The hand-overs of a model so far.
#[derive(Debug, Clone, Deserialize)]
pub struct HandoverCountsJson {
    /// The number of completed hand-overs.
    pub completed: u64,
    /// The number of aborted hand-overs.
    pub aborted: u64,
    /// The number of hand-overs rolled back soon after their completion.
    #[serde(default)]
    pub rolled_back: u64,
    /// The number of worker deaths after which a standby took over.
    #[serde(default)]
    pub failovers: u64,
    /// The most recent hand-over.
    pub last: Option<HandoverJson>,
}

/// A hand-over.
#[derive(Debug, Clone, Deserialize)]
pub struct HandoverJson {
    /// The number of SMs before.
    pub from_sms: u32,
    /// The number of SMs after.
    pub to_sms: u32,
    /// The way in which the share changed.
    #[serde(default)]
    pub mechanism: String,
    /// The time from the decision to the first completed batch at the new share, in ms; `None` before
    /// that batch.
    pub effect_ms: Option<f64>,
    /// The time for which a batch was ready and a slot free, but no lane took the batch, in us.
    pub stall_us: Option<f64>,
    /// The outcome, such as `completed`.
    pub outcome: Option<String>,
    /// The origin of the order, such as `hand` or the policy.
    pub cause: Option<String>,
    /// True if a standby was ready.
    pub at_once: Option<bool>,
}

/// The output of `shadowslice reload --json`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ReloadJson {
    /// The models that the reload changed.
    pub models: Vec<ModelChangeJson>,
    /// The number of unchanged models.
    pub unchanged: usize,
}

/// The effect of a reload on one model.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ModelChangeJson {
    /// The name of the model.
    pub name: String,
    /// `added`, `removed`, `changed` or `replaced`.
    pub change: String,
    /// The keys whose values differ.
    pub keys: Vec<String>,
    /// The reason why the change is not in effect, if so.
    pub why: Option<String>,
}

impl ReloadJson {
    /// Returns the name of each changed model, and the kind of the change.
    pub fn changes(&self) -> Vec<(&str, &str)> {
        self.models.iter().map(|model| (model.name.as_str(), model.change.as_str())).collect()
    }
}

impl StatusJson {
    /// Returns the model with that name.
    pub fn model(&self, name: &str) -> Option<&ModelStatusJson> {
        self.models.iter().find(|model| model.name == name)
    }
}
