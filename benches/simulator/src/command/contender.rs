//! What decides, as the command line names it.

use std::fmt;
use std::str::FromStr;

use shadowslice_policy::sharing::{Choice, ModelSpec, Pattern, Policy, UnknownPolicy};
use shadowslice_shared::contention::Gpu;
use shadowslice_simulator::loads::cheapest;
use shadowslice_simulator::scenario::{Arrival, Scenario};

const LAYOUTS: &str = "layouts";

const LAYOUT: &str = "layout:";

/// A policy, or fixed layouts with admission.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Contender {
    Policy(Choice),
    /// Each layout of the adaptive policy's family that applies, one after the other.
    Layouts,
    /// One of them, by name.
    Layout(String),
}

/// One policy to run, and its name.
pub(super) struct Entrant {
    pub(super) name: String,
    pub(super) policy: Policy,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("no layout `{name}` applies to these models; give `{LAYOUTS}`, or one of {}", .known.join(", "))]
pub(super) struct NoSuchLayout {
    name: String,
    known: Vec<String>,
}

impl FromStr for Contender {
    type Err = UnknownPolicy;

    fn from_str(text: &str) -> Result<Self, UnknownPolicy> {
        match text.strip_prefix(LAYOUT) {
            Some(name) => Ok(Self::Layout(name.to_owned())),
            None if text == LAYOUTS => Ok(Self::Layouts),
            None => text.parse().map(Self::Policy),
        }
    }
}

impl fmt::Display for Contender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Policy(choice) => choice.fmt(f),
            Self::Layouts => f.write_str(LAYOUTS),
            Self::Layout(name) => write!(f, "{LAYOUT}{name}"),
        }
    }
}

impl Contender {
    /// Returns the policies that run. Layouts go by the work of these arrivals.
    pub(super) fn entrants(
        &self,
        scenario: &Scenario,
        arrivals: &[Arrival],
        seconds: f64,
    ) -> Result<Vec<Entrant>, NoSuchLayout> {
        let terms: Vec<ModelSpec> = scenario.models.iter().map(|served| served.terms.clone()).collect();
        let gpus: Vec<Gpu> = scenario.gpus.iter().copied().map(Gpu::new).collect();
        if let Self::Policy(choice) = self {
            let policy = Policy::new(*choice, &gpus, &terms);
            return Ok(vec![Entrant { name: choice.to_string(), policy }]);
        }
        let work = work(scenario, arrivals, seconds);
        let all = Policy::layouts(&gpus, &terms, &work);
        let is_meant = |pattern: &&Pattern| match self {
            Self::Layout(name) => pattern.to_string() == *name,
            _ => true,
        };
        let entrant = |pattern: &Pattern| Entrant {
            name: format!("{LAYOUT}{pattern}"),
            policy: Policy::of_layout(*pattern, &gpus, &terms, &work),
        };
        let found: Vec<Entrant> = all.iter().filter(is_meant).map(entrant).collect();
        match self {
            Self::Layout(name) if found.is_empty() => {
                let known = all.iter().map(Pattern::to_string).collect();
                Err(NoSuchLayout { name: name.clone(), known })
            }
            _ => Ok(found),
        }
    }
}

/// Returns the part of its GPU that each model's requests take at their cheapest.
fn work(scenario: &Scenario, arrivals: &[Arrival], seconds: f64) -> Vec<f64> {
    let mut work = vec![0.0; scenario.models.len()];
    for arrival in arrivals {
        work[arrival.model] += 1.0 / seconds;
    }
    for (work, served) in work.iter_mut().zip(&scenario.models) {
        let gpu = scenario.gpus[served.terms.gpu];
        *work *= cheapest(&served.truth, gpu, served.terms.slo, served.terms.max_batch) / f64::from(gpu.0);
    }
    work
}
