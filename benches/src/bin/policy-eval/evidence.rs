//! The evidence of the runs. It shows which mixes are easy, which of the easy mixes the policy
//! harms, and how often shares change under a steady load.

use shadowslice_simulator::results::SimulationRun;

use crate::compare::run;
use crate::simulate::{BASE, EVALUATED, MixRuns};

/// The minimum fraction of requests in time without a policy that each model of an easy mix has.
const EASY_FROM: f64 = 0.99;

/// The maximum loss of requests in time in an easy mix, as a fraction of all requests.
const MAX_LOSS: f64 = 0.003;

/// The maximum ratio of a median latency to its baseline in an easy mix.
const MEDIAN_FACTOR: f64 = 1.1;
/// The growth of a median latency that is allowed in addition to the factor, in ms.
const MEDIAN_SLACK_MS: f64 = 0.5;

/// The time after which shares must no longer change under a steady load, in seconds since the
/// start.
pub(crate) const AT_REST_FROM_S: f64 = 30.0;
/// The number of share changes per minute from which shares are not at rest.
pub(crate) const MOVES_PER_MINUTE: f64 = 1.0;

/// All mixes, divided into easy and hard ones.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Evidence {
    pub(crate) easy: Vec<MixRuns>,
    pub(crate) hard: Vec<MixRuns>,
}

/// The harm that the evaluated policy caused in an easy mix.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Harm {
    pub(crate) mix: String,
    /// The loss of requests in time, as a fraction of all requests.
    pub(crate) loss: f64,
    /// The number of requests that were refused in addition to those refused without a policy.
    pub(crate) refused: u64,
    /// The model whose median latency exceeds the limit most, and the excess in ms.
    pub(crate) slower: Option<(String, f64)>,
}

impl Harm {
    pub(crate) fn is_none(&self) -> bool {
        self.loss <= MAX_LOSS && self.refused == 0 && self.slower.is_none()
    }
}

impl Evidence {
    pub(crate) fn of(trials: Vec<MixRuns>) -> Self {
        let is_easy = |trial: &MixRuns| {
            run(trial, BASE)
                .is_some_and(|run| run.per_model.values().all(|model| model.attainment >= EASY_FROM))
        };
        let (easy, hard) = trials.into_iter().partition(is_easy);
        Self { easy, hard }
    }

    /// Returns the harm to each easy mix that the policy harmed.
    pub(crate) fn harmed(&self) -> Vec<Harm> {
        self.easy.iter().filter_map(harm).filter(|harm| !harm.is_none()).collect()
    }
}

fn harm(trial: &MixRuns) -> Option<Harm> {
    let (evaluated, base) = (run(trial, EVALUATED)?, run(trial, BASE)?);
    let refused = |run: &SimulationRun| run.per_model.values().map(|model| model.refused).sum::<u64>();
    let slower = evaluated.per_model.iter().filter_map(|(name, model)| {
        let limit = base.per_model.get(name)?.p50_ms * MEDIAN_FACTOR + MEDIAN_SLACK_MS;
        (model.p50_ms > limit).then(|| (name.clone(), model.p50_ms - limit))
    });
    Some(Harm {
        mix: trial.mix.to_string(),
        loss: base.attainment - evaluated.attainment,
        refused: refused(evaluated).saturating_sub(refused(base)),
        slower: slower.max_by(|(_, one), (_, other)| one.total_cmp(other)),
    })
}

/// Returns the share changes per minute of each mix after [`AT_REST_FROM_S`].
pub(crate) fn moves_at_rest(trials: &[MixRuns], seconds: f64) -> Vec<f64> {
    let minutes = (seconds - AT_REST_FROM_S) / 60.0;
    let moves = |trial: &MixRuns| {
        let models = trial.runs.iter().flat_map(|run| run.per_model.values());
        let late = models.flat_map(|model| &model.repartitioned_at_s).filter(|&&at| at >= AT_REST_FROM_S);
        late.count() as f64 / minutes
    };
    trials.iter().map(moves).collect()
}
