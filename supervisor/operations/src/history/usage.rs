//! The SM time that each model used in the last hour.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use tokio::time::Instant;

use crate::status::{HostStatus, ModelStatus};

/// The time between two steps. The beginning of the hour is exact to one step.
const STEP: Duration = Duration::from_secs(60);

/// The number of steps in an hour.
const STEPS: usize = 60;

/// The counters of all models and GPUs in the last hour.
#[derive(Debug, Default)]
pub(super) struct HourlyUsage(VecDeque<UsageStep>);

#[derive(Debug)]
struct UsageStep {
    at: Instant,
    /// The SM time of each version of a model since its start, in SM·s.
    models: BTreeMap<(String, u32), f64>,
    /// The SM time of each GPU since the supervisor's start, in SM·s.
    gpus: Vec<f64>,
}

impl HourlyUsage {
    /// Records the counters, at most once in a step.
    pub(super) fn record(&mut self, at: Instant, status: &HostStatus) {
        if self.0.back().is_some_and(|last| at.saturating_duration_since(last.at) < STEP) {
            return;
        }
        let models = status.models.iter().map(|model| (instance(model), used(model))).collect();
        let gpus = status.gpus.iter().map(|gpu| gpu.sm_seconds).collect();
        self.0.push_back(UsageStep { at, models, gpus });
        if self.0.len() > STEPS {
            self.0.pop_front();
        }
    }

    /// Returns the percentage of its GPU's SM time that a model used in the last hour, or since the first
    /// record if that is later.
    pub(super) fn percent(&self, model: &ModelStatus, status: &HostStatus) -> f64 {
        let Some(first) = self.0.front() else { return 0.0 };
        let gpu = status.gpus.get(model.gpu).map_or(0.0, |gpu| gpu.sm_seconds);
        let capacity = gpu - first.gpus.get(model.gpu).copied().unwrap_or_default();
        // If a model was replaced, its counter started again from zero.
        let before = first.models.get(&instance(model)).copied().filter(|&before| before <= used(model));
        let used = used(model) - before.unwrap_or_default();
        if capacity > 0.0 { (100.0 * used / capacity).clamp(0.0, 100.0) } else { 0.0 }
    }
}

fn instance(model: &ModelStatus) -> (String, u32) {
    (model.model.clone(), model.version)
}

fn used(model: &ModelStatus) -> f64 {
    model.sm_use.map_or(0.0, |used| used.sm_seconds)
}

#[cfg(test)]
mod tests {
    use shadowslice_datapath::pipeline::SmUse;

    use super::*;

    fn status(gpu_s: f64, used: f64) -> HostStatus {
        let sm_use = Some(SmUse { sm_seconds: 100.0 * used, energy_j: None });
        let model = ModelStatus { name: "a".to_owned(), sm_use, ..ModelStatus::default() };
        let gpu = serde_json::json!({"index": 0, "device": "emulated", "uuid": null, "backend": "emulated",
            "sms": 100, "sm_seconds": 100.0 * gpu_s, "mps_server_pid": null, "why": null, "nvml": null});
        let host = serde_json::json!({"host": "serving", "ready": true, "models": [], "gpus": [gpu]});
        HostStatus { models: vec![model], ..serde_json::from_value(host).unwrap() }
    }

    fn percent(usage: &HourlyUsage, gpu_s: f64, used: f64) -> f64 {
        let status = status(gpu_s, used);
        usage.percent(&status.models[0], &status).round()
    }

    #[test]
    fn the_use_of_the_last_hour_counts_also_of_a_model_that_was_replaced() {
        let (mut usage, began) = (HourlyUsage::default(), Instant::now());
        assert_eq!(percent(&usage, 10.0, 5.0), 0.0, "nothing is known yet");
        usage.record(began, &status(100.0, 50.0));
        assert_eq!(percent(&usage, 100.0, 50.0), 0.0);
        assert_eq!(percent(&usage, 120.0, 55.0), 25.0);
        assert_eq!(percent(&usage, 120.0, 15.0), 75.0, "the counter started again");
        // In the first hour, the model uses half of the GPU, and then a tenth.
        for minute in 1..=120_u32 {
            let used = f64::from(minute.min(60)) * 30.0 + f64::from(minute.saturating_sub(60)) * 6.0;
            usage.record(began + STEP * minute, &status(100.0 + 60.0 * f64::from(minute), 50.0 + used));
        }
        assert_eq!(percent(&usage, 100.0 + 7_200.0, 50.0 + 2_160.0), 10.0);
        assert_eq!(usage.0.len(), STEPS);
    }
}
