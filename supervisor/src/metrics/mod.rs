//! The metrics, in the text format of Prometheus. Pure: from a status to a text.

mod table;
mod text;

use crate::pipeline::LatencyHistogram;
use crate::status::ModelStatus;

/// What is told of one model.
#[derive(Debug)]
pub struct Model {
    /// How it stands.
    pub status: ModelStatus,
    /// The latencies of its answers since the start.
    pub latency: LatencyHistogram,
}

/// The text for these models.
pub fn render(models: &[Model]) -> String {
    let mut text = String::new();
    for metric in table::METRICS {
        text::write(&mut text, metric, models);
    }
    text
}

#[cfg(test)]
mod tests;
