//! The metrics, in the text format of Prometheus. Pure: from a status to a text.

mod gpus;
mod policy;
mod table;
mod text;

use crate::control::Changes;
use crate::pipeline::LatencyHistogram;
use crate::status::{GpuStatus, ModelStatus};
use text::{Subject, escaped};

/// What is told of one model.
#[derive(Debug)]
pub struct Model {
    /// How it stands.
    pub status: ModelStatus,
    /// The latencies of its answers since the start.
    pub latency: LatencyHistogram,
    /// The changes of its share since the start.
    pub changes: Changes,
}

/// What is told of the policy.
#[derive(Debug)]
pub struct Policy {
    /// Its name.
    pub name: String,
    /// How long its decisions took since the start.
    pub took: LatencyHistogram,
}

impl Subject for Policy {
    fn labels(&self) -> String {
        format!("policy=\"{}\"", escaped(&self.name))
    }
}

impl Subject for Model {
    fn labels(&self) -> String {
        format!("model=\"{}\",gpu=\"{}\"", escaped(&self.status.name), self.status.gpu)
    }
}

impl Subject for GpuStatus {
    fn labels(&self) -> String {
        format!("gpu=\"{}\"", self.index)
    }
}

/// The text for these models and GPUs, and for the policy, if one decides.
pub fn render(models: &[Model], policy: Option<&Policy>, gpus: &[GpuStatus]) -> String {
    let mut text = String::new();
    for metric in table::METRICS {
        text::write(&mut text, metric, models);
    }
    for metric in policy::METRICS {
        text::write(&mut text, metric, policy.map_or(&[], std::slice::from_ref));
    }
    for metric in gpus::METRICS {
        text::write(&mut text, metric, gpus);
    }
    text
}

#[cfg(test)]
mod tests;
