//! The evaluation of the runs. It shows which mixes are easy, in which easy mixes the adaptive
//! policy is worse than no policy (harm), and how often shares change under a steady load.

use shadowslice_simulator::results::SimulationRun;

use super::compare::run;
use super::simulate::{BASE, EVALUATED, MixRuns};

/// The minimum fraction of requests in time that each model of an easy mix has without a policy.
const EASY_FROM: f64 = 0.99;

/// The maximum loss of requests in time, relative to the run without a policy, that does not count
/// as harm. It is a fraction of all requests of an easy mix.
const MAX_LOSS: f64 = 0.003;

/// The maximum ratio of a model's median latency to its median latency without a policy, in an easy
/// mix.
const MEDIAN_FACTOR: f64 = 1.1;
/// The increase of a median latency, in ms, that is allowed in addition to [`MEDIAN_FACTOR`].
const MEDIAN_SLACK_MS: f64 = 0.5;

/// The time after which shares should no longer change under a steady load, in seconds since the
/// start of the run.
pub(crate) const AT_REST_FROM_S: f64 = 30.0;
/// The lowest number of share changes per minute at which the shares of a mix count as still
/// changing.
pub(crate) const MOVES_PER_MINUTE: f64 = 1.0;

/// All mixes, divided into easy mixes and hard mixes.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Evidence {
    pub(crate) easy: Vec<MixRuns>,
    pub(crate) hard: Vec<MixRuns>,
}

/// The harm that the evaluated policy does in an easy mix, compared with the run without a policy.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Harm {
    pub(crate) mix: String,
    /// The loss of requests in time compared with the run without a policy, as a fraction of all
    /// requests.
    pub(crate) loss: f64,
    /// The number of requests that were refused in addition to those refused in the run without a
    /// policy.
    pub(crate) refused: u64,
    /// The model whose median latency exceeds its limit by the largest amount, and that amount in
    /// ms. `None` if no median exceeds its limit.
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

    /// Returns the harm in each easy mix in which the policy did harm.
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

/// Returns the number of share changes per minute of each mix, counted after [`AT_REST_FROM_S`].
pub(crate) fn moves_at_rest(trials: &[MixRuns], seconds: f64) -> Vec<f64> {
    let minutes = (seconds - AT_REST_FROM_S) / 60.0;
    let moves = |trial: &MixRuns| {
        let models = trial.runs.iter().flat_map(|run| run.per_model.values());
        let late = models.flat_map(|model| &model.repartitioned_at_s).filter(|&&at| at >= AT_REST_FROM_S);
        late.count() as f64 / minutes
    };
    trials.iter().map(moves).collect()
}
