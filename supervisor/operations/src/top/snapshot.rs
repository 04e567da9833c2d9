//! The data on the screen: one reply of the supervisor, and the difference to the reply before it.

use super::interval::Interval;
use crate::status::{GpuStatus, HostStatus, ModelStatus, SupervisorStatus};
use shadowslice_control::controller::{ModelPlan, PlanReport};
use shadowslice_datapath::readiness::HostState;

/// The supervisor's reply to one poll.
#[derive(Debug, Clone)]
pub(crate) struct PollResult {
    pub(super) status: HostStatus,
    pub(super) plan: PlanReport,
}

/// The data from which a screen is drawn.
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
    /// The letter of the model in the maps of GPUs.
    pub(super) key: char,
    pub(super) status: ModelStatus,
    /// The policy's plan; `None` without a policy or before its first decision.
    pub(super) plan: Option<ModelPlan>,
    /// The time since the previous reply; `None` after a single reply.
    pub(super) since: Option<Interval>,
}

impl TopModel {
    /// Returns true if no request came in the last interval, or in the last minute or two after a
    /// single reply.
    pub(super) fn is_idle(&self) -> bool {
        self.since.map_or_else(|| self.status.is_idle(), |since| since.idle)
    }

    pub(super) fn is_ready(&self) -> bool {
        self.status.state == "ready"
    }

    /// Returns true if the model violates its SLO.
    pub(super) fn violates_slo(&self) -> bool {
        let slo = &self.status.slo;
        !self.is_idle() && slo.attainment.is_some_and(|met| met * 100.0 < slo.percentile)
    }
}

impl TopSnapshot {
    pub(super) fn of(result: &PollResult, before: Option<&PollResult>) -> Self {
        let models = result.status.models.iter().enumerate().map(|(place, model)| TopModel {
            key: key(place),
            status: model.clone(),
            plan: result.plan.models.iter().find(|plan| plan.name == model.name).cloned(),
            since: before.and_then(|before| since(model, before)),
        });
        Self {
            supervisor: result.status.supervisor.clone(),
            host: result.status.host,
            ready: result.status.ready,
            policy: result.plan.policy.clone(),
            act: result.plan.act,
            models: models.collect(),
            gpus: result.status.gpus.clone(),
        }
    }

    /// Returns the models with workers on a GPU, by the GPU's index in the configuration.
    pub(super) fn on(&self, gpu: usize) -> impl Iterator<Item = &TopModel> {
        self.models.iter().filter(move |model| model.status.gpu == gpu && !model.status.workers.is_empty())
    }
}

fn since(model: &ModelStatus, before: &PollResult) -> Option<Interval> {
    let earlier = before.status.models.iter().find(|earlier| earlier.name == model.name)?;
    Interval::between(earlier, model)
}

/// Returns a letter for each of the first 52 models, and `#` for the others.
fn key(place: usize) -> char {
    ('a'..='z').chain('A'..='Z').nth(place).unwrap_or('#')
}
