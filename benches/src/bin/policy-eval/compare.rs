//! How the policies compare with each other, with the best fixed layout, and with the fluid bound.

use shadowslice_simulator::results::Run;

use crate::simulate::{JUDGED, LAYOUT, OPEN, Trial};

/// So much less than under the best fixed layout may be in time, as a part of all requests.
pub(crate) const BEHIND: f64 = 0.01;

/// Parts of the requests that were in time, on average over mixes: of all requests, and of the
/// requests of the highest priority of each mix.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct InTime {
    pub(crate) all: f64,
    pub(crate) first: f64,
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
pub(crate) struct Behind<'t> {
    pub(crate) trial: &'t Trial,
    pub(crate) best: &'t Run,
    pub(crate) judged: &'t Run,
}

impl Behind<'_> {
    /// Returns how much less is in time, as a part of all requests.
    pub(crate) fn part(&self) -> f64 {
        self.best.attainment - self.judged.attainment
    }

    /// Whether more of the first priority is in time than under the best layout.
    pub(crate) fn saves_first(&self) -> bool {
        of_first_priority(self.judged) > of_first_priority(self.best)
    }
}

pub(crate) fn run<'t>(trial: &'t Trial, policy: &str) -> Option<&'t Run> {
    trial.runs.iter().find(|run| run.policy == policy)
}

/// Returns the run of the layout with the most requests in time, known only with hindsight.
pub(crate) fn best_layout(trial: &Trial) -> Option<&Run> {
    let layouts = trial.runs.iter().filter(|run| run.policy == OPEN || run.policy.starts_with(LAYOUT));
    layouts.max_by(|one, other| one.goodput_rps.total_cmp(&other.goodput_rps))
}

/// Returns what a policy keeps in time over these mixes.
pub(crate) fn in_time(trials: &[Trial], policy: &str) -> Option<InTime> {
    let runs: Vec<(&Run, &Run)> =
        trials.iter().filter_map(|trial| Some((run(trial, policy)?, best_layout(trial)?))).collect();
    let behind = runs.iter().map(|(run, best)| best.attainment - run.attainment);
    (!runs.is_empty()).then(|| InTime {
        all: mean(runs.iter().map(|(run, _)| run.attainment)),
        first: mean(runs.iter().map(|(run, _)| of_first_priority(run))),
        behind: behind.fold(f64::NEG_INFINITY, f64::max),
    })
}

/// Returns how far the judged policy is from the best layout and from the bound.
pub(crate) fn ratios(trials: &[Trial]) -> Option<Ratios> {
    let ratio = |trial: &Trial| {
        let (judged, best) = (run(trial, JUDGED)?, best_layout(trial)?);
        let over = |other: f64| if other > 0.0 { judged.goodput_rps / other } else { 1.0 };
        Some(Ratios { best_layout: over(best.goodput_rps), bound: over(judged.bound_rps) })
    };
    let all: Vec<Ratios> = trials.iter().filter_map(ratio).collect();
    (!all.is_empty()).then(|| Ratios {
        best_layout: mean(all.iter().map(|ratios| ratios.best_layout)),
        bound: mean(all.iter().map(|ratios| ratios.bound)),
    })
}

/// Returns the mixes in which the judged policy is too far behind the best layout, the worst first.
pub(crate) fn behind(trials: &[Trial]) -> Vec<Behind<'_>> {
    let compared = |trial| Some(Behind { trial, best: best_layout(trial)?, judged: run(trial, JUDGED)? });
    let mut all: Vec<Behind<'_>> =
        trials.iter().filter_map(compared).filter(|behind| behind.part() > BEHIND).collect();
    all.sort_by(|one, other| other.part().total_cmp(&one.part()));
    all
}

pub(crate) fn of_first_priority(run: &Run) -> f64 {
    let highest = run.per_model.values().map(|model| model.priority).min();
    let first = run.per_model.values().filter(|model| Some(model.priority) == highest);
    let (offered, kept) = first
        .fold((0.0, 0.0), |(offered, kept), model| (offered + model.offered_rps, kept + model.goodput_rps));
    if offered > 0.0 { kept / offered } else { 1.0 }
}

fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = values.len().max(1);
    values.sum::<f64>() / count as f64
}
