//! The output of `shadowslice status --json` and `shadowslice resize --json`, as other programs
//! read it.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Deserialize;
use serde_json::{Map, Value};

/// The whole answer.
#[derive(Debug, Clone, Deserialize)]
pub struct StatusJson {
    /// The process that answers.
    pub supervisor: SupervisorJson,
    /// Every model.
    pub models: Vec<ModelStatusJson>,
    /// Every GPU.
    pub gpus: Vec<GpuStatusJson>,
}

/// A supervisor's process.
#[derive(Debug, Clone, Deserialize)]
pub struct SupervisorJson {
    /// The program's version.
    pub version: String,
    /// Its process.
    pub pid: i32,
    /// Since its start, in seconds.
    pub age_s: f64,
    /// The configuration that it was started with.
    pub config: PathBuf,
}

/// One GPU.
#[derive(Debug, Clone, Deserialize)]
pub struct GpuStatusJson {
    /// Its place in the configuration.
    pub index: usize,
    /// `emulated`, an index or a UUID.
    pub device: String,
    /// NVML's facts about the GPU, if it gives any.
    pub nvml: Option<Value>,
    /// `emulated`, `mps` or `none`.
    pub backend: String,
    /// Its SMs.
    pub sms: u32,
    /// The MPS server.
    pub mps_server_pid: Option<i32>,
    /// Why it takes no workers.
    pub why: Option<String>,
}

/// One model.
#[derive(Debug, Clone, Deserialize)]
pub struct ModelStatusJson {
    /// Its name.
    pub name: String,
    /// `ready`, or another state.
    pub state: String,
    /// The share in force.
    pub share_percent: u32,
    /// The SMs of that share.
    pub sms: u32,
    /// How it is changed: `in-process`, `shadow`, `restart` or `never`.
    #[serde(default)]
    pub mechanism: String,
    /// The groups of SMs of a partition inside the worker.
    pub groups: Option<String>,
    /// Its worker processes.
    pub workers: Vec<WorkerStatusJson>,
    /// The outcomes of its requests.
    pub requests: RequestCountsJson,
    /// Its promise to clients.
    pub slo: SloStatusJson,
    /// Its hand-overs.
    pub handovers: HandoverCountsJson,
    /// All further keys of the model.
    #[serde(flatten)]
    pub more: Map<String, Value>,
}

/// One worker process.
#[derive(Debug, Clone, Deserialize)]
pub struct WorkerStatusJson {
    /// `incumbent`, `shadow`, or another role.
    pub role: String,
    /// Its process.
    pub pid: i32,
    /// Its SMs.
    pub sms: u32,
    /// The memory that it has on a real GPU.
    pub memory_mib: Option<u64>,
    /// All further keys of the worker.
    #[serde(flatten)]
    pub more: Map<String, Value>,
}

/// Requests by their outcome.
#[derive(Debug, Clone, Deserialize)]
pub struct RequestCountsJson {
    /// Taken into the queue.
    pub accepted: u64,
    /// Answered.
    pub succeeded: u64,
    /// Answered with an error.
    pub failed: u64,
    /// Refused, on arrival or out of the queue.
    pub rejected: u64,
    /// At fault themselves.
    pub invalid: u64,
    /// All that were refused, by the reason.
    pub refused: BTreeMap<String, u64>,
    /// Executed again after a worker's death.
    pub retried: u64,
    /// Given up by their clients before they had all of the answer.
    pub cancelled: u64,
}

/// A service level objective.
#[derive(Debug, Clone, Deserialize)]
pub struct SloStatusJson {
    /// The latency promised, in milliseconds.
    pub latency_ms: f64,
    /// The part of the recent requests that kept it; `None` while the model takes no requests.
    pub attainment: Option<f64>,
}

/// Hand-overs so far.
#[derive(Debug, Clone, Deserialize)]
pub struct HandoverCountsJson {
    /// Hand-overs after which the new worker serves.
    pub completed: u64,
    /// Hand-overs that were given up.
    pub aborted: u64,
    /// Hand-overs that were taken back soon after they were completed.
    #[serde(default)]
    pub rolled_back: u64,
    /// Deaths after which a standing worker served.
    #[serde(default)]
    pub failovers: u64,
    /// The last hand-over.
    pub last: Option<HandoverJson>,
}

/// One hand-over.
#[derive(Debug, Clone, Deserialize)]
pub struct HandoverJson {
    /// The SMs before.
    pub from_sms: u32,
    /// The SMs after.
    pub to_sms: u32,
    /// How it was done.
    #[serde(default)]
    pub mechanism: String,
    /// From the decision to the first batch completed at the new share, in ms; `None` before that
    /// batch.
    pub effect_ms: Option<f64>,
    /// How long a batch was ready, a slot free, and no lane took it.
    pub stall_us: Option<f64>,
    /// How it went.
    pub outcome: Option<String>,
    /// The origin of the hand-over's order.
    pub cause: Option<String>,
    /// Whether a worker stood ready.
    pub at_once: Option<bool>,
}

/// The outcome of a reload.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ReloadJson {
    /// Every model that it changed.
    pub models: Vec<ModelChangeJson>,
    /// Models that were not touched.
    pub unchanged: usize,
}

/// The outcome for one model.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ModelChangeJson {
    /// Its name.
    pub name: String,
    /// `added`, `removed`, `changed` or `replaced`.
    pub change: String,
    /// The keys that differ.
    pub keys: Vec<String>,
    /// Why that is not in force.
    pub why: Option<String>,
}

impl ReloadJson {
    /// Name and kind of every change.
    pub fn changes(&self) -> Vec<(&str, &str)> {
        self.models.iter().map(|model| (model.name.as_str(), model.change.as_str())).collect()
    }
}

impl StatusJson {
    /// The model of that name.
    pub fn model(&self, name: &str) -> Option<&ModelStatusJson> {
        self.models.iter().find(|model| model.name == name)
    }
}
