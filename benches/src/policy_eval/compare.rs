//! The comparison of the policies with each other, with the best fixed layout and with the fluid
//! bound.

use std::collections::BTreeMap;

use shadowslice_simulator::results::SimulationRun;

use super::simulate::{EVALUATED, LAYOUT, MixRuns, OPEN};

/// The largest allowed lead of the best fixed layout over the evaluated policy, as a [weighted]
/// fraction of requests in time.
pub(crate) const MAX_GAP: f64 = 0.01;

/// The weight of a priority divided by the weight of the next lower priority. The objective
/// function of the evaluated policy uses the same factor.
pub(crate) const PRIORITY_WEIGHT: f64 = 4.0;

/// The fractions of requests in time under one policy, as means over mixes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct InTimeRates {
    pub(crate) all: f64,
    /// The fraction among the requests to the models with the highest priority in each mix.
    pub(crate) first: f64,
    pub(crate) weighted: f64,
    /// The largest difference, over all mixes, between the weighted fraction under the best fixed
    /// layout and that under the policy.
    pub(crate) largest_gap: f64,
}

/// The results of the evaluated policy divided by those of a reference, as means over mixes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Ratios {
    pub(crate) best_layout: f64,
    pub(crate) bound: f64,
}

/// A mix in which a fixed layout answers more requests in time than the evaluated policy, and the
/// two runs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct LayoutGap<'t> {
    pub(crate) trial: &'t MixRuns,
    pub(crate) best: &'t SimulationRun,
    pub(crate) evaluated: &'t SimulationRun,
}

impl LayoutGap<'_> {
    /// Returns the difference between the two runs, as a [weighted] fraction of requests in time.
    pub(crate) fn size(&self) -> f64 {
        weighted(self.best) - weighted(self.evaluated)
    }
}

pub(crate) fn run<'t>(trial: &'t MixRuns, policy: &str) -> Option<&'t SimulationRun> {
    trial.runs.iter().find(|run| run.policy == policy)
}

/// Returns the run of the fixed layout with the largest [weighted] fraction of requests in time.
pub(crate) fn best_layout(trial: &MixRuns) -> Option<&SimulationRun> {
    let layouts = trial.runs.iter().filter(|run| run.policy == OPEN || run.policy.starts_with(LAYOUT));
    layouts.max_by(|one, other| weighted(one).total_cmp(&weighted(other)))
}

/// Returns the fractions of requests in time under a policy. Returns `None` if no mix has a run of
/// this policy.
pub(crate) fn in_time(trials: &[MixRuns], policy: &str) -> Option<InTimeRates> {
    let runs: Vec<(&SimulationRun, &SimulationRun)> =
        trials.iter().filter_map(|trial| Some((run(trial, policy)?, best_layout(trial)?))).collect();
    let gaps = runs.iter().map(|(run, best)| weighted(best) - weighted(run));
    (!runs.is_empty()).then(|| InTimeRates {
        all: mean(runs.iter().map(|(run, _)| run.attainment)),
        first: mean(runs.iter().map(|(run, _)| of_first_priority(run))),
        weighted: mean(runs.iter().map(|(run, _)| weighted(run))),
        largest_gap: gaps.fold(f64::NEG_INFINITY, f64::max),
    })
}

/// Returns the ratios of the evaluated policy's results to those of the best fixed layout and to
/// the fluid bound.
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

/// Returns the mixes in which the best fixed layout beats the evaluated policy by more than
/// [`MAX_GAP`]. The mix with the largest gap comes first.
pub(crate) fn gaps(trials: &[MixRuns]) -> Vec<LayoutGap<'_>> {
    let gap = |trial| Some(LayoutGap { trial, best: best_layout(trial)?, evaluated: run(trial, EVALUATED)? });
    let mut all: Vec<LayoutGap<'_>> =
        trials.iter().filter_map(gap).filter(|gap| gap.size() > MAX_GAP).collect();
    all.sort_by(|one, other| other.size().total_cmp(&one.size()));
    all
}

/// Returns the fraction of requests in time among the requests to models with the highest priority.
pub(crate) fn of_first_priority(run: &SimulationRun) -> f64 {
    by_priority(run).first().copied().unwrap_or(1.0)
}

/// Returns the mean fraction of requests in time over all priorities, weighted with
/// [`PRIORITY_WEIGHT`].
pub(crate) fn weighted(run: &SimulationRun) -> f64 {
    let weights = std::iter::successors(Some(1.0), |weight| Some(weight / PRIORITY_WEIGHT));
    let (sum, kept) = by_priority(run)
        .into_iter()
        .zip(weights)
        .fold((0.0, 0.0), |(sum, kept), (part, weight)| (sum + weight, kept + weight * part));
    if sum > 0.0 { kept / sum } else { 1.0 }
}

/// Returns the fraction of requests in time for each priority, from the highest to the lowest.
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
