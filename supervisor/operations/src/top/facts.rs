//! What is shown: one answer of the supervisor, and what happened since the answer before.

use super::interval::Interval;
use crate::status::{GpuStatus, ModelStatus, Status, SupervisorStatus};
use shadowslice_control::controller::{ModelPlan, PlanReport};
use shadowslice_datapath::readiness::HostState;

/// What the supervisor answers at one time.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(super) status: Status,
    pub(super) plan: PlanReport,
}

#[derive(Debug, Clone)]
pub(super) struct Facts {
    pub(super) supervisor: Option<SupervisorStatus>,
    pub(super) host: HostState,
    pub(super) ready: bool,
    pub(super) policy: String,
    pub(super) act: bool,
    pub(super) models: Vec<ModelFacts>,
    pub(super) gpus: Vec<GpuStatus>,
}

#[derive(Debug, Clone)]
pub(super) struct ModelFacts {
    /// Stands for the model in the maps of GPUs.
    pub(super) key: char,
    pub(super) status: ModelStatus,
    /// `None` where no policy decides, or none has decided yet.
    pub(super) plan: Option<ModelPlan>,
    /// `None` after a single answer.
    pub(super) since: Option<Interval>,
}

impl ModelFacts {
    /// No request in the last interval; before there is one, none in the last minute or two.
    pub(super) fn is_idle(&self) -> bool {
        self.since.map_or_else(|| self.status.is_idle(), |since| since.idle)
    }

    pub(super) fn is_ready(&self) -> bool {
        self.status.state == "ready"
    }

    /// More of its requests miss the SLO than may.
    pub(super) fn misses(&self) -> bool {
        let slo = &self.status.slo;
        !self.is_idle() && slo.attainment.is_some_and(|met| met * 100.0 < slo.percentile)
    }
}

impl Facts {
    pub(super) fn of(seen: &Seen, before: Option<&Seen>) -> Self {
        let models = seen.status.models.iter().enumerate().map(|(place, model)| ModelFacts {
            key: key(place),
            status: model.clone(),
            plan: seen.plan.models.iter().find(|plan| plan.name == model.name).cloned(),
            since: before.and_then(|before| since(model, before)),
        });
        Self {
            supervisor: seen.status.supervisor.clone(),
            host: seen.status.host,
            ready: seen.status.ready,
            policy: seen.plan.policy.clone(),
            act: seen.plan.act,
            models: models.collect(),
            gpus: seen.status.gpus.clone(),
        }
    }

    /// The models of a GPU, by its place in the configuration.
    pub(super) fn on(&self, gpu: usize) -> impl Iterator<Item = &ModelFacts> {
        self.models.iter().filter(move |model| model.status.gpu == gpu && !model.status.workers.is_empty())
    }
}

fn since(model: &ModelStatus, before: &Seen) -> Option<Interval> {
    let earlier = before.status.models.iter().find(|earlier| earlier.name == model.name)?;
    Interval::between(earlier, model)
}

/// A letter for each of the first 52 models.
fn key(place: usize) -> char {
    ('a'..='z').chain('A'..='Z').nth(place).unwrap_or('#')
}
