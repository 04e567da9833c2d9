//! The agreement between the simulated and the real runs of a case, and the targets for this
//! agreement.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::spread::Spread;

use super::cases::ReplayCase;
use super::outcomes::{OutcomeCounts, RunOutcome};
use super::real::ReplayResult;

/// The maximum difference between the real and the simulated goodput, as a fraction of the
/// simulated goodput.
pub(crate) const GOODPUT_TOLERANCE: f64 = 0.05;
/// The maximum difference between the real and the simulated p99 latency, as a fraction of the
/// simulated p99 latency.
pub(crate) const P99_TOLERANCE: f64 = 0.15;
/// The maximum difference between the real and the simulated number of repartitions.
pub(crate) const REPARTITIONS_TOLERANCE: f64 = 1.0;

/// A figure of the simulated runs, and the same figure of the real runs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Pair {
    pub(crate) simulated: Spread,
    pub(crate) real: Spread,
}

/// The pairs of figures for all requests, or for the requests of one model.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Pairs {
    pub(crate) offered: u64,
    pub(crate) in_time: Pair,
    pub(crate) p99_ms: Pair,
    pub(crate) repartitions: Pair,
    pub(crate) refused: Pair,
}

/// The comparison of a case's simulated and real runs.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Agreement {
    pub(crate) case: ReplayCase,
    pub(crate) all: Pairs,
    pub(crate) per_model: BTreeMap<String, Pairs>,
    /// The number of rounds that other programs did not disturb. If this number is not zero, the
    /// figures come only from these rounds.
    pub(crate) quiet: usize,
    pub(crate) rounds: Vec<ReplayResult>,
}

impl Pair {
    /// Returns the real median divided by the simulated median, or 1 if the medians are equal.
    pub(crate) fn ratio(&self) -> f64 {
        let (real, simulated) = (self.real.median, self.simulated.median);
        if real == simulated { 1.0 } else { real / simulated }
    }

    /// Returns true if the medians differ by at most this fraction of the simulated median.
    pub(crate) fn is_within_fraction(&self, fraction: f64) -> bool {
        self.is_within(fraction * self.simulated.median)
    }

    /// Returns true if the medians differ by at most `difference`.
    pub(crate) fn is_within(&self, difference: f64) -> bool {
        (self.real.median - self.simulated.median).abs() <= difference
    }
}

impl Pairs {
    fn of(simulated: &[OutcomeCounts], real: &[OutcomeCounts]) -> Self {
        let spread =
            |parts: &[OutcomeCounts], figure: fn(&OutcomeCounts) -> f64| Spread::of(parts.iter().map(figure));
        let pair = |figure| Pair { simulated: spread(simulated, figure), real: spread(real, figure) };
        Self {
            offered: simulated.iter().map(|part| part.offered).max().unwrap_or_default(),
            in_time: pair(|part| part.in_time as f64),
            p99_ms: pair(|part| part.p99_ms),
            repartitions: pair(|part| part.repartitions as f64),
            refused: pair(|part| part.refused as f64),
        }
    }

    /// Returns whether the targets for goodput, p99 latency and repartitions are met, in this
    /// order.
    pub(crate) fn met(&self) -> [bool; 3] {
        [
            self.in_time.is_within_fraction(GOODPUT_TOLERANCE),
            self.p99_ms.is_within_fraction(P99_TOLERANCE),
            self.repartitions.is_within(REPARTITIONS_TOLERANCE),
        ]
    }
}

impl Agreement {
    /// Compares the runs of a case. The case must have at least one simulated phase and at least
    /// one real round.
    pub(crate) fn of(case: ReplayCase, simulated: &[RunOutcome], rounds: &[ReplayResult]) -> Self {
        let quiet = rounds.iter().filter(|round| round.is_quiet()).count();
        let simulated: Vec<&RunOutcome> = simulated.iter().collect();
        let counted = rounds.iter().filter(|round| quiet == 0 || round.is_quiet());
        let counted: Vec<&RunOutcome> = counted.map(|round| &round.figures).collect();
        let pairs = |part: &dyn Fn(&RunOutcome) -> OutcomeCounts| {
            let [simulated, real]: [Vec<OutcomeCounts>; 2] =
                [&simulated, &counted].map(|runs| runs.iter().map(|run| part(run)).collect());
            Pairs::of(&simulated, &real)
        };
        let names = simulated.iter().flat_map(|figures| figures.per_model.keys());
        let of_model = |name: &String| (name.clone(), pairs(&|figures| figures.per_model[name]));
        let per_model = names.map(of_model).collect();
        Self { case, all: pairs(&|figures| figures.all), per_model, quiet, rounds: rounds.to_vec() }
    }
}
