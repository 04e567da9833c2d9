//! The data that the screen shows: a reply of the supervisor, and its difference from the previous
//! reply.

use super::interval::Interval;
use crate::plan::{ModelPlan, PlanReport};
use crate::status::{GpuStatus, HostStatus, ModelStatus, SupervisorStatus};
use shadowslice_control::controller::ReportedState;
use shadowslice_datapath::readiness::HostState;

/// The supervisor's reply to one poll.
#[derive(Debug, Clone)]
pub(crate) struct PollResult {
    pub(super) status: HostStatus,
    pub(super) plan: PlanReport,
}

/// The data from which the screen is drawn.
#[derive(Debug, Clone)]
pub(super) struct TopSnapshot {
    pub(super) supervisor: Option<SupervisorStatus>,
    pub(super) host: HostState,
    pub(super) ready: bool,
    pub(super) policy: String,
    /// True if decisions are applied, or if no policy decides.
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
    /// The changes since the previous reply. `None` if there is only one reply.
    pub(super) since: Option<Interval>,
}

impl TopModel {
    /// Returns true if no request arrived in the last interval. If there is only one reply, uses
    /// the last minute or two instead of the interval.
    pub(super) fn is_idle(&self) -> bool {
        self.since.map_or_else(|| self.status.is_idle(), |since| since.idle)
    }

    pub(super) fn is_ready(&self) -> bool {
        self.status.state == ReportedState::Ready
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
            policy: result.plan.policy.to_string(),
            act: result.plan.act || result.plan.is_static(),
            models: models.collect(),
            gpus: result.status.gpus.clone(),
        }
    }

    /// Returns the models with workers on the GPU that has this index in the configuration.
    pub(super) fn on(&self, gpu: usize) -> impl Iterator<Item = &TopModel> {
        self.models.iter().filter(move |model| model.status.gpu == gpu && !model.status.workers.is_empty())
    }
}

fn since(model: &ModelStatus, before: &PollResult) -> Option<Interval> {
    let earlier = before.status.models.iter().find(|earlier| earlier.name == model.name)?;
    Interval::between(earlier, model)
}

/// Returns a different letter for each of the first 52 models, and `#` for all others.
fn key(place: usize) -> char {
    ('a'..='z').chain('A'..='Z').nth(place).unwrap_or('#')
}
