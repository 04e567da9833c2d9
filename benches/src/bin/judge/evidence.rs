//! The evidence of the runs.

use shadowslice_simulator::results::Run;

use crate::simulate::{BASE, JUDGED, Trial};

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
    pub(crate) easy: Vec<Trial>,
    pub(crate) hard: Vec<Trial>,
}

/// Parts of the requests that were in time, on average over mixes: of all requests, and of the
/// requests of the highest priority of each mix.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct InTime {
    pub(crate) all: f64,
    pub(crate) first: f64,
}

/// How a mix was harmed in which there was nothing to help.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Harm {
    pub(crate) seed: u64,
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
    pub(crate) fn of(trials: Vec<Trial>) -> Self {
        let is_easy = |trial: &Trial| {
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

fn run<'t>(trial: &'t Trial, policy: &str) -> Option<&'t Run> {
    trial.runs.iter().find(|run| run.policy == policy)
}

/// The part that a policy keeps in time, on average over these mixes.
pub(crate) fn in_time(trials: &[Trial], policy: &str) -> Option<InTime> {
    let runs: Vec<&Run> = trials.iter().filter_map(|trial| run(trial, policy)).collect();
    let mean = |of: fn(&Run) -> f64| runs.iter().map(|run| of(run)).sum::<f64>() / runs.len() as f64;
    (!runs.is_empty()).then(|| InTime { all: mean(|run| run.attainment), first: mean(of_first_priority) })
}

fn of_first_priority(run: &Run) -> f64 {
    let highest = run.per_model.values().map(|model| model.priority).min();
    let first = run.per_model.values().filter(|model| Some(model.priority) == highest);
    let (offered, kept) = first
        .fold((0.0, 0.0), |(offered, kept), model| (offered + model.offered_rps, kept + model.goodput_rps));
    if offered > 0.0 { kept / offered } else { 1.0 }
}

fn harm(trial: &Trial) -> Option<Harm> {
    let (judged, base) = (run(trial, JUDGED)?, run(trial, BASE)?);
    let refused = |run: &Run| run.per_model.values().map(|model| model.refused).sum::<u64>();
    let slower = judged.per_model.iter().filter_map(|(name, model)| {
        let may = base.per_model.get(name)?.p50_ms * SLOWER + SLOWER_MS;
        (model.p50_ms > may).then(|| (name.clone(), model.p50_ms - may))
    });
    Some(Harm {
        seed: trial.seed,
        less: base.attainment - judged.attainment,
        refused: refused(judged).saturating_sub(refused(base)),
        slower: slower.max_by(|(_, one), (_, other)| one.total_cmp(other)),
    })
}

/// Changes in a minute once a load has not changed for long, in the mix that has most, and on average.
pub(crate) fn moves_at_rest(trials: &[Trial], seconds: f64) -> (f64, f64) {
    let minutes = (seconds - AT_REST_FROM_S) / 60.0;
    let moves = |trial: &Trial| {
        let models = trial.runs.iter().flat_map(|run| run.per_model.values());
        let late = models.flat_map(|model| &model.repartitioned_at_s).filter(|&&at| at >= AT_REST_FROM_S);
        late.count() as f64 / minutes
    };
    let all: Vec<f64> = trials.iter().map(moves).collect();
    (all.iter().copied().fold(0.0, f64::max), all.iter().sum::<f64>() / all.len().max(1) as f64)
}
