//! How the policies compare with each other, with the best fixed layout, and with the fluid bound.

use std::collections::BTreeMap;

use shadowslice_simulator::results::SimulationRun;

use crate::simulate::{EVALUATED, LAYOUT, MixRuns, OPEN};

/// How far behind the best fixed layout the judged policy may be, in [weighted] parts in time.
pub(crate) const BEHIND: f64 = 0.01;

/// How much one priority's part in time counts beside that of the next lower one: the objective of
/// the judged policy.
pub(crate) const WORTH: f64 = 4.0;

/// The parts of the requests that were in time, on average over mixes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct InTimeRates {
    pub(crate) all: f64,
    /// Those of the highest priority of each mix.
    pub(crate) first: f64,
    pub(crate) weighted: f64,
    /// The most that the policy is behind the best fixed layout in one mix.
    pub(crate) behind: f64,
}

/// What the judged policy serves in time over what others do, on average over mixes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Ratios {
    pub(crate) best_layout: f64,
    pub(crate) bound: f64,
}

/// A mix in which the judged policy is behind the best fixed layout.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct LayoutGap<'t> {
    pub(crate) trial: &'t MixRuns,
    pub(crate) best: &'t SimulationRun,
    pub(crate) evaluated: &'t SimulationRun,
}

impl LayoutGap<'_> {
    /// Returns how much less is in time, as a [weighted] part.
    pub(crate) fn part(&self) -> f64 {
        weighted(self.best) - weighted(self.evaluated)
    }
}

pub(crate) fn run<'t>(trial: &'t MixRuns, policy: &str) -> Option<&'t SimulationRun> {
    trial.runs.iter().find(|run| run.policy == policy)
}

/// Returns the run of the layout that keeps the most in time, [weighted]: known only with hindsight.
pub(crate) fn best_layout(trial: &MixRuns) -> Option<&SimulationRun> {
    let layouts = trial.runs.iter().filter(|run| run.policy == OPEN || run.policy.starts_with(LAYOUT));
    layouts.max_by(|one, other| weighted(one).total_cmp(&weighted(other)))
}

/// Returns what a policy keeps in time over these mixes.
pub(crate) fn in_time(trials: &[MixRuns], policy: &str) -> Option<InTimeRates> {
    let runs: Vec<(&SimulationRun, &SimulationRun)> =
        trials.iter().filter_map(|trial| Some((run(trial, policy)?, best_layout(trial)?))).collect();
    let behind = runs.iter().map(|(run, best)| weighted(best) - weighted(run));
    (!runs.is_empty()).then(|| InTimeRates {
        all: mean(runs.iter().map(|(run, _)| run.attainment)),
        first: mean(runs.iter().map(|(run, _)| of_first_priority(run))),
        weighted: mean(runs.iter().map(|(run, _)| weighted(run))),
        behind: behind.fold(f64::NEG_INFINITY, f64::max),
    })
}

/// Returns how far the judged policy is from the best layout and from the bound.
pub(crate) fn ratios(trials: &[MixRuns]) -> Option<Ratios> {
    let ratio = |trial: &MixRuns| {
        let (evaluated, best) = (run(trial, EVALUATED)?, best_layout(trial)?);
        let over = |own: f64, other: f64| if other > 0.0 { own / other } else { 1.0 };
        Some(Ratios {
            best_layout: over(weighted(evaluated), weighted(best)),
            bound: over(evaluated.goodput_rps, evaluated.bound_rps),
        })
    };
    let all: Vec<Ratios> = trials.iter().filter_map(ratio).collect();
    (!all.is_empty()).then(|| Ratios {
        best_layout: mean(all.iter().map(|ratios| ratios.best_layout)),
        bound: mean(all.iter().map(|ratios| ratios.bound)),
    })
}

/// Returns the mixes in which the judged policy is too far behind the best layout, the worst first.
pub(crate) fn behind(trials: &[MixRuns]) -> Vec<LayoutGap<'_>> {
    let compared =
        |trial| Some(LayoutGap { trial, best: best_layout(trial)?, evaluated: run(trial, EVALUATED)? });
    let mut all: Vec<LayoutGap<'_>> =
        trials.iter().filter_map(compared).filter(|behind| behind.part() > BEHIND).collect();
    all.sort_by(|one, other| other.part().total_cmp(&one.part()));
    all
}

pub(crate) fn of_first_priority(run: &SimulationRun) -> f64 {
    by_priority(run).first().copied().unwrap_or(1.0)
}

/// Returns the mean over priorities of the parts in time, each counted as [`WORTH`] of the next one.
pub(crate) fn weighted(run: &SimulationRun) -> f64 {
    let weights = std::iter::successors(Some(1.0), |weight| Some(weight / WORTH));
    let (sum, kept) = by_priority(run)
        .into_iter()
        .zip(weights)
        .fold((0.0, 0.0), |(sum, kept), (part, weight)| (sum + weight, kept + weight * part));
    if sum > 0.0 { kept / sum } else { 1.0 }
}

/// Returns the part in time of each priority's requests, the highest first.
fn by_priority(run: &SimulationRun) -> Vec<f64> {
    let mut kept = BTreeMap::new();
    for model in run.per_model.values() {
        let (offered, good) = kept.entry(model.priority).or_insert((0.0, 0.0));
        *offered += model.offered_rps;
        *good += model.goodput_rps;
    }
    kept.into_values().map(|(offered, good)| if offered > 0.0 { good / offered } else { 1.0 }).collect()
}

fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = values.len().max(1);
    values.sum::<f64>() / count as f64
}
