//! How well the two sides of a case agree, and whether that is as well as is aimed at.

use std::collections::BTreeMap;

use serde::Serialize;
use shadowslice_benches::spread::Spread;

use crate::cases::ReplayCase;
use crate::outcomes::{OutcomeCounts, RunOutcome};
use crate::real::ReplayResult;

/// How far apart real and simulated runs may be: goodput and p99 as a part of the simulated figure,
/// repartitions as a number.
pub(crate) const GOODPUT: f64 = 0.05;
pub(crate) const P99: f64 = 0.15;
pub(crate) const REPARTITIONS: f64 = 1.0;

/// A figure of both sides.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Pair {
    pub(crate) simulated: Spread,
    pub(crate) real: Spread,
}

/// The figures of all requests, or of one model's requests.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Pairs {
    pub(crate) offered: u64,
    pub(crate) in_time: Pair,
    pub(crate) p99_ms: Pair,
    pub(crate) repartitions: Pair,
    pub(crate) refused: Pair,
}

/// Both sides of a case.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Agreement {
    pub(crate) case: ReplayCase,
    pub(crate) all: Pairs,
    pub(crate) per_model: BTreeMap<String, Pairs>,
    /// Rounds that other programs did not disturb. If there are any, the figures come from these
    /// rounds.
    pub(crate) quiet: usize,
    pub(crate) rounds: Vec<ReplayResult>,
}

impl Pair {
    /// Real over simulated; 1 where both are nothing.
    pub(crate) fn ratio(&self) -> f64 {
        let (real, simulated) = (self.real.median, self.simulated.median);
        if real == simulated { 1.0 } else { real / simulated }
    }

    /// Whether the real figures are within this part of the simulated figure.
    pub(crate) fn within(&self, part: f64) -> bool {
        self.apart_by(part * self.simulated.median)
    }

    /// Whether they are within this number of each other.
    pub(crate) fn apart_by(&self, number: f64) -> bool {
        (self.real.median - self.simulated.median).abs() <= number
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

    /// Which aims are met: goodput, p99, repartitions.
    pub(crate) fn met(&self) -> [bool; 3] {
        [self.in_time.within(GOODPUT), self.p99_ms.within(P99), self.repartitions.apart_by(REPARTITIONS)]
    }
}

impl Agreement {
    /// The comparison of a case with at least one phase and one round.
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
