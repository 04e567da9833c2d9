//! The data that the screen shows: a reply of the supervisor, by model.

use serde::{Deserialize, Serialize};

use crate::history::ModelSample;
use crate::status::{GpuStatus, HostStatus, ModelStatus, SupervisorStatus};
use shadowslice_control::controller::{ModelPlan, PlanReport, ReportedState};
use shadowslice_datapath::readiness::HostState;

/// The supervisor's reply to one poll.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TopReply {
    pub status: HostStatus,
    pub plan: PlanReport,
    /// The last sample of each model, as the web page shows it. It is empty in the first seconds
    /// after a start.
    pub samples: Vec<ModelSample>,
}

/// The data from which the screen is drawn.
#[derive(Debug, Clone)]
pub(super) struct TopSnapshot {
    pub(super) supervisor: Option<SupervisorStatus>,
    pub(super) host: HostState,
    pub(super) ready: bool,
    pub(super) policy: String,
    pub(super) act: bool,
    pub(super) models: Vec<TopModel>,
    pub(super) gpus: Vec<GpuStatus>,
}

#[derive(Debug, Clone)]
pub(super) struct TopModel {
    /// The letter that represents the model in the maps of GPUs.
    pub(super) key: char,
    pub(super) status: ModelStatus,
    /// The policy's plan. `None` without a policy or before its first decision.
    pub(super) plan: Option<ModelPlan>,
    /// The last sample. `None` before the first sample of the model.
    pub(super) sample: Option<ModelSample>,
}

impl TopModel {
    /// Returns true if the model had no requests in the last sample. Without a sample, uses the last
    /// minute or two.
    pub(super) fn is_idle(&self) -> bool {
        let status = &self.status;
        let is_idle = self.sample.as_ref().map_or_else(|| status.is_idle(), ModelSample::is_idle);
        is_idle && status.queue == 0 && status.in_flight == 0
    }

    pub(super) fn is_ready(&self) -> bool {
        self.status.state == ReportedState::Ready
    }
}

impl TopSnapshot {
    pub(super) fn of(TopReply { status, plan, samples }: TopReply) -> Self {
        let HostStatus { supervisor, host, ready, models, gpus, .. } = status;
        let model = |(place, model): (usize, ModelStatus)| TopModel {
            key: key(place),
            plan: plan.models.iter().find(|plan| plan.name == model.name).cloned(),
            sample: samples.iter().find(|sample| sample.name == model.name).cloned(),
            status: model,
        };
        let models = models.into_iter().enumerate().map(model).collect();
        Self { supervisor, host, ready, policy: plan.policy, act: plan.act, models, gpus }
    }

    /// Returns the models with workers on the GPU that has this index in the configuration.
    pub(super) fn on(&self, gpu: usize) -> impl Iterator<Item = &TopModel> {
        self.models.iter().filter(move |model| model.status.gpu == gpu && !model.status.workers.is_empty())
    }
}

/// Returns a different letter for each of the first 52 models, and `#` for all others.
fn key(place: usize) -> char {
    ('a'..='z').chain('A'..='Z').nth(place).unwrap_or('#')
}
