//! The JSON output of `shadowslice status`, `resize` and `reload`, as another program would parse
//! it.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Deserialize;
use serde_json::{Map, Value};

/// The output of `shadowslice status --json`.
#[derive(Debug, Clone, Deserialize)]
pub struct StatusJson {
    /// The supervisor that printed the status.
    pub supervisor: SupervisorJson,
    /// All models of the supervisor.
    pub models: Vec<ModelStatusJson>,
    /// All GPUs of the supervisor.
    pub gpus: Vec<GpuStatusJson>,
}

/// The supervisor process.
#[derive(Debug, Clone, Deserialize)]
pub struct SupervisorJson {
    /// The version of the program.
    pub version: String,
    pub pid: i32,
    /// The time since the supervisor started, in seconds.
    pub age_s: f64,
    /// The path of the configuration file.
    pub config: PathBuf,
}

/// The status of a GPU.
#[derive(Debug, Clone, Deserialize)]
pub struct GpuStatusJson {
    /// The index of the GPU in the configuration.
    pub index: usize,
    /// The configured device: `emulated`, an index or a UUID.
    pub device: String,
    /// The data that NVML reports about the GPU, if there is any.
    pub nvml: Option<Value>,
    /// The way in which workers share the GPU: `emulated`, `mps` or `none`.
    pub backend: String,
    /// The number of SMs of the GPU.
    pub sms: u32,
    /// The PID of the MPS server.
    pub mps_server_pid: Option<i32>,
    /// The reason why workers cannot start on the GPU, if there is one.
    pub why: Option<String>,
}

/// The status of a model.
#[derive(Debug, Clone, Deserialize)]
pub struct ModelStatusJson {
    pub name: String,
    /// The state, such as `ready`.
    pub state: String,
    /// The current share, in percent.
    pub share_percent: u32,
    /// The number of SMs of the current share.
    pub sms: u32,
    /// The way in which the share changes: `in-process`, `shadow` or `never`.
    #[serde(default)]
    pub mechanism: String,
    /// The groups of SMs in the model's partition, if its share changes inside the worker.
    pub groups: Option<String>,
    /// The worker processes.
    pub workers: Vec<WorkerStatusJson>,
    /// The numbers of requests by outcome.
    pub requests: RequestCountsJson,
    /// The service level objective of the model.
    pub slo: SloStatusJson,
    /// The counts of hand-overs so far.
    pub handovers: HandoverCountsJson,
    /// All other keys.
    #[serde(flatten)]
    pub more: Map<String, Value>,
}

/// The status of a worker process.
#[derive(Debug, Clone, Deserialize)]
pub struct WorkerStatusJson {
    /// The role, such as `incumbent` or `shadow`.
    pub role: String,
    pub pid: i32,
    /// The number of SMs that the worker may use.
    pub sms: u32,
    /// The worker's memory on a real GPU, in MiB.
    pub memory_mib: Option<u64>,
    /// All other keys.
    #[serde(flatten)]
    pub more: Map<String, Value>,
}

/// The numbers of requests by outcome.
#[derive(Debug, Clone, Deserialize)]
pub struct RequestCountsJson {
    /// The number of requests that were accepted into the queue.
    pub accepted: u64,
    /// The number of requests that were answered without an error.
    pub succeeded: u64,
    /// The number of requests that were answered with an error.
    pub failed: u64,
    /// The number of requests that were refused on arrival or in the queue.
    pub rejected: u64,
    /// The number of invalid requests.
    pub invalid: u64,
    /// The number of refused requests, by reason.
    pub refused: BTreeMap<String, u64>,
    /// The number of requests that were executed again after a worker died.
    pub retried: u64,
    /// The number of requests whose client disconnected before the end of the response.
    pub cancelled: u64,
}

/// A service level objective.
#[derive(Debug, Clone, Deserialize)]
pub struct SloStatusJson {
    /// The latency target, in milliseconds.
    pub latency_ms: f64,
    /// The fraction of recent requests within the latency target, or `None` if there were no
    /// requests.
    pub attainment: Option<f64>,
}

/// The counts of a model's hand-overs so far.
#[derive(Debug, Clone, Deserialize)]
pub struct HandoverCountsJson {
    pub completed: u64,
    pub aborted: u64,
    /// The number of hand-overs that were rolled back soon after their completion.
    #[serde(default)]
    pub rolled_back: u64,
    /// The number of worker deaths after which a standby took over.
    #[serde(default)]
    pub failovers: u64,
    /// The most recent hand-over.
    pub last: Option<HandoverJson>,
}

/// The result of a hand-over.
#[derive(Debug, Clone, Deserialize)]
pub struct HandoverJson {
    /// The number of SMs before the hand-over.
    pub from_sms: u32,
    /// The number of SMs after the hand-over.
    pub to_sms: u32,
    /// The way in which the share changed.
    #[serde(default)]
    pub mechanism: String,
    /// The time from the decision to the end of the first batch at the new share, in ms. `None`
    /// before the end of that batch.
    pub effect_ms: Option<f64>,
    /// The longest time in which a batch was ready and a slot was free, but no worker took the
    /// batch, in us.
    pub stall_us: Option<f64>,
    /// The outcome, such as `completed`.
    pub outcome: Option<String>,
    /// The origin of the change, such as `hand` for a command.
    pub cause: Option<String>,
    /// True if a standby was ready, so that no worker had to start.
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
    pub name: String,
    /// The kind of the change: `added`, `removed`, `changed` or `replaced`.
    pub change: String,
    /// The keys whose values differ.
    pub keys: Vec<String>,
    /// The reason why the change is not in effect, if there is one.
    pub why: Option<String>,
}

impl ReloadJson {
    /// Returns the name of each changed model and the kind of its change.
    pub fn changes(&self) -> Vec<(&str, &str)> {
        self.models.iter().map(|model| (model.name.as_str(), model.change.as_str())).collect()
    }
}

impl StatusJson {
    pub fn model(&self, name: &str) -> Option<&ModelStatusJson> {
        self.models.iter().find(|model| model.name == name)
    }
}
