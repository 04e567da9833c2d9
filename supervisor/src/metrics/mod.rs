//! The metrics, in the text format of Prometheus. Pure: from a status to a text.

mod gpus;
mod table;
mod text;

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

/// The text for these models and GPUs.
pub fn render(models: &[Model], gpus: &[GpuStatus]) -> String {
    let mut text = String::new();
    for metric in table::METRICS {
        text::write(&mut text, metric, models);
    }
    for metric in gpus::METRICS {
        text::write(&mut text, metric, gpus);
    }
    text
}

#[cfg(test)]
mod tests;
