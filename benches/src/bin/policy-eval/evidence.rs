//! The evidence of the runs.

use shadowslice_simulator::results::SimulationRun;

use crate::compare::run;
use crate::simulate::{BASE, EVALUATED, MixRuns};

/// Where this part of every model's requests is in time without any policy, there is nothing to help.
const EASY: f64 = 0.99;

/// How much less may be in time there.
const HARM: f64 = 0.003;

/// How much longer a median may be there: in proportion, and in ms on top.
const SLOWER: f64 = 1.1;
const SLOWER_MS: f64 = 0.5;

/// From this time on, in seconds, no share moves under a load that does not change: at most so many
/// changes in a minute.
pub(crate) const AT_REST_FROM_S: f64 = 30.0;
pub(crate) const MOVES_PER_MINUTE: f64 = 1.0;

/// All mixes, told apart by whether there is anything to help.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Evidence {
    pub(crate) easy: Vec<MixRuns>,
    pub(crate) hard: Vec<MixRuns>,
}

/// How a mix was harmed in which there was nothing to help.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Harm {
    pub(crate) mix: String,
    /// How much less was in time, as a part of all requests.
    pub(crate) less: f64,
    /// Requests that were refused, and had not been.
    pub(crate) refused: u64,
    /// The model with the largest growth of its median, and how much longer the median is than
    /// allowed, in ms.
    pub(crate) slower: Option<(String, f64)>,
}

impl Harm {
    pub(crate) fn is_none(&self) -> bool {
        self.less <= HARM && self.refused == 0 && self.slower.is_none()
    }
}

impl Evidence {
    pub(crate) fn of(trials: Vec<MixRuns>) -> Self {
        let is_easy = |trial: &MixRuns| {
            run(trial, BASE).is_some_and(|run| run.per_model.values().all(|model| model.attainment >= EASY))
        };
        let (easy, hard) = trials.into_iter().partition(is_easy);
        Self { easy, hard }
    }

    /// The mixes that were harmed without any need.
    pub(crate) fn harmed(&self) -> Vec<Harm> {
        self.easy.iter().filter_map(harm).filter(|harm| !harm.is_none()).collect()
    }
}

fn harm(trial: &MixRuns) -> Option<Harm> {
    let (evaluated, base) = (run(trial, EVALUATED)?, run(trial, BASE)?);
    let refused = |run: &SimulationRun| run.per_model.values().map(|model| model.refused).sum::<u64>();
    let slower = evaluated.per_model.iter().filter_map(|(name, model)| {
        let may = base.per_model.get(name)?.p50_ms * SLOWER + SLOWER_MS;
        (model.p50_ms > may).then(|| (name.clone(), model.p50_ms - may))
    });
    Some(Harm {
        mix: trial.mix.to_string(),
        less: base.attainment - evaluated.attainment,
        refused: refused(evaluated).saturating_sub(refused(base)),
        slower: slower.max_by(|(_, one), (_, other)| one.total_cmp(other)),
    })
}

/// Returns the changes of shares in a minute once a load has not changed for long, of each mix.
pub(crate) fn moves_at_rest(trials: &[MixRuns], seconds: f64) -> Vec<f64> {
    let minutes = (seconds - AT_REST_FROM_S) / 60.0;
    let moves = |trial: &MixRuns| {
        let models = trial.runs.iter().flat_map(|run| run.per_model.values());
        let late = models.flat_map(|model| &model.repartitioned_at_s).filter(|&&at| at >= AT_REST_FROM_S);
        late.count() as f64 / minutes
    };
    trials.iter().map(moves).collect()
}
