//! The policies that the command line selects.

use std::fmt;
use std::str::FromStr;

use shadowslice_policy::sharing::{Choice, ModelSpec, Pattern, Policy, UnknownPolicy};
use shadowslice_shared::contention::SharedGpu;
use shadowslice_simulator::loads::cheapest;
use shadowslice_simulator::scenario::{Scenario, SimulatedArrival};

const LAYOUTS: &str = "layouts";

const LAYOUT: &str = "layout:";

/// An argument of `--policy`: a policy, a fixed layout, or all fixed layouts. Fixed layouts have
/// admission control.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum PolicyArgument {
    Policy(Choice),
    /// Every layout of the adaptive policy that is possible with the models. The layouts run one
    /// after the other.
    Layouts,
    /// The fixed layout with this name.
    Layout(String),
}

/// A policy to run, and its name in the results.
pub(super) struct NamedPolicy {
    pub(super) name: String,
    pub(super) policy: Policy,
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("no layout `{name}` applies to these models; use `{LAYOUTS}` or one of {}", .known.join(", "))]
pub(super) struct NoSuchLayout {
    name: String,
    known: Vec<String>,
}

impl FromStr for PolicyArgument {
    type Err = UnknownPolicy;

    fn from_str(text: &str) -> Result<Self, UnknownPolicy> {
        match text.strip_prefix(LAYOUT) {
            Some(name) => Ok(Self::Layout(name.to_owned())),
            None if text == LAYOUTS => Ok(Self::Layouts),
            None => text.parse().map(Self::Policy),
        }
    }
}

impl fmt::Display for PolicyArgument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Policy(choice) => choice.fmt(f),
            Self::Layouts => f.write_str(LAYOUTS),
            Self::Layout(name) => write!(f, "{LAYOUT}{name}"),
        }
    }
}

impl PolicyArgument {
    /// Returns the policies to run. Which layouts are possible depends on how much of the GPU each
    /// model needs for these arrivals.
    pub(super) fn policies(
        &self,
        scenario: &Scenario,
        arrivals: &[SimulatedArrival],
        seconds: f64,
    ) -> Result<Vec<NamedPolicy>, NoSuchLayout> {
        let terms: Vec<ModelSpec> = scenario.models.iter().map(|model| model.terms.clone()).collect();
        let gpus: Vec<SharedGpu> = scenario.gpus.iter().copied().map(SharedGpu::new).collect();
        if let Self::Policy(choice) = self {
            let policy = Policy::new(*choice, &gpus, &terms);
            return Ok(vec![NamedPolicy { name: choice.to_string(), policy }]);
        }
        let work = work(scenario, arrivals, seconds);
        let all = Policy::layouts(&gpus, &terms, &work);
        let is_selected = |pattern: &&Pattern| match self {
            Self::Layout(name) => pattern.to_string() == *name,
            _ => true,
        };
        let named = |pattern: &Pattern| NamedPolicy {
            name: format!("{LAYOUT}{pattern}"),
            policy: Policy::of_layout(*pattern, &gpus, &terms, &work),
        };
        let found: Vec<NamedPolicy> = all.iter().filter(is_selected).map(named).collect();
        match self {
            Self::Layout(name) if found.is_empty() => {
                let known = all.iter().map(Pattern::to_string).collect();
                Err(NoSuchLayout { name: name.clone(), known })
            }
            _ => Ok(found),
        }
    }
}

/// Returns the fraction of its GPU that each model needs if each of its requests has the minimum
/// cost.
fn work(scenario: &Scenario, arrivals: &[SimulatedArrival], seconds: f64) -> Vec<f64> {
    let mut work = vec![0.0; scenario.models.len()];
    for arrival in arrivals {
        work[arrival.model] += 1.0 / seconds;
    }
    for (work, model) in work.iter_mut().zip(&scenario.models) {
        let gpu = scenario.gpus[model.terms.gpu];
        *work *= cheapest(&model.truth, gpu, model.terms.slo, model.terms.max_batch) / f64::from(gpu.0);
    }
    work
}
