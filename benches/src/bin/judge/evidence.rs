//! The runs that are judged, in order.

use std::collections::BTreeMap;

use shadowslice_simulator::results::{ModelRun, Run};

/// Why runs cannot be judged.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Gap {
    #[error("{policy} under {load} has no runs of the same seeds as the others; simulate again")]
    Unpaired { load: String, policy: String },
    #[error("one seed says nothing about others; give at least two")]
    TooFew,
}

/// Runs by load and policy; each entry has the same seeds in the same order.
#[derive(Debug)]
pub(crate) struct Evidence {
    runs: BTreeMap<(String, String), Vec<Run>>,
}

impl Evidence {
    /// Checks that every one of these policies met every one of these loads with the same seeds.
    pub(crate) fn new(all: Vec<Run>, loads: &[&str], policies: &[String]) -> Result<Self, Gap> {
        let mut runs: BTreeMap<(String, String), Vec<Run>> = BTreeMap::new();
        for run in all {
            runs.entry((run.load.clone(), run.policy.clone())).or_default().push(run);
        }
        runs.values_mut().for_each(|runs| runs.sort_by_key(|run| run.seed));
        let evidence = Self { runs };
        let seeds = |load: &str, policy: &str| -> Vec<u64> {
            evidence.of(load, policy).iter().map(|run| run.seed).collect()
        };
        let (Some(load), Some(policy)) = (loads.first(), policies.first()) else { return Err(Gap::TooFew) };
        let first = seeds(load, policy);
        if first.len() < 2 {
            return Err(Gap::TooFew);
        }
        for load in loads {
            if let Some(policy) = policies.iter().find(|policy| seeds(load, policy) != first) {
                return Err(Gap::Unpaired { load: (*load).to_owned(), policy: policy.clone() });
            }
        }
        Ok(evidence)
    }

    /// A policy's runs under a load, by seed.
    pub(crate) fn of(&self, load: &str, policy: &str) -> &[Run] {
        self.runs.get(&(load.to_owned(), policy.to_owned())).map_or(&[], Vec::as_slice)
    }

    /// All of a policy's runs.
    pub(crate) fn all_of<'e>(&'e self, policy: &'e str) -> impl Iterator<Item = &'e Run> {
        self.runs.iter().filter(move |((_, by), _)| by == policy).flat_map(|(_, runs)| runs)
    }
}

/// Which models are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Part {
    All,
    /// Those of a priority.
    Class(u32),
}

impl Part {
    /// All models, then the priorities that several of the runs have, the highest first: of one run there is no interval.
    pub(crate) fn of(runs: &[Run]) -> Vec<Self> {
        let mut classes: Vec<u32> =
            runs.iter().flat_map(|run| run.per_model.values()).map(|model| model.priority).collect();
        classes.sort_unstable();
        classes.dedup();
        let several = |part: &Self| runs.iter().filter(|run| part.is_in(run)).count() > 1;
        let classes = classes.into_iter().map(Self::Class).filter(several);
        [Self::All].into_iter().chain(classes).collect()
    }

    /// Whether a run has any of these models.
    pub(crate) fn is_in(self, run: &Run) -> bool {
        self.sum(run, |_| 1.0) > 0.0
    }

    fn sum(self, run: &Run, figure: impl Fn(&ModelRun) -> f64) -> f64 {
        let counts = |model: &&ModelRun| self == Self::All || self == Self::Class(model.priority);
        run.per_model.values().filter(counts).map(figure).sum()
    }

    /// Requests per second; at least one in the run, so that parts of it are numbers.
    pub(crate) fn offered(self, run: &Run) -> f64 {
        self.sum(run, |model| model.offered_rps).max(1e-3)
    }

    /// Requests answered within their SLOs per second.
    pub(crate) fn goodput(self, run: &Run) -> f64 {
        self.sum(run, |model| model.goodput_rps)
    }

    /// The ideal's, under the same load.
    pub(crate) fn ideal_goodput(self, run: &Run) -> f64 {
        self.sum(run, |model| model.ideal_goodput_rps)
    }

    pub(crate) fn text(self) -> String {
        match self {
            Self::All => "all".to_owned(),
            Self::Class(priority) => format!("priority {priority}"),
        }
    }
}
