//! The policies that the command line selects.

use std::fmt;
use std::str::FromStr;

use shadowslice_policy::sharing::{Choice, Decision, ModelSpec, Pattern, Policy, PolicyInput};
use shadowslice_shared::contention::SharedGpu;
use shadowslice_shared::units::Sms;
use shadowslice_simulator::baselines::{Baseline, BaselineName, UnknownBaseline};
use shadowslice_simulator::loads::cheapest;
use shadowslice_simulator::scenario::{Scenario, SimulatedArrival};

const LAYOUTS: &str = "layouts";

const LAYOUT: &str = "layout:";

/// The suffix of a policy's name under which no batch is paused.
const NO_PREEMPTION_SUFFIX: &str = "+no-preemption";

/// An argument of `--policy`: a policy of the supervisor, a baseline, a fixed layout, or all fixed
/// layouts. Fixed layouts have admission control.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum PolicyArgument {
    Policy {
        choice: Choice,
        /// True if the name has the suffix `+no-preemption`.
        never_pauses: bool,
    },
    Baseline {
        name: BaselineName,
        refuses_late: bool,
    },
    /// Every layout of the adaptive policy that is possible with the models. The layouts run one
    /// after the other.
    Layouts,
    /// The fixed layout with this name.
    Layout(String),
}

/// A policy to run, and its name in the results.
pub(super) struct NamedPolicy {
    pub(super) name: String,
    /// True if the policy lets batches wait for batches of other models that would be late.
    pub(super) pauses: bool,
    pub(super) policy: SimulatedPolicy,
}

/// A policy of the supervisor, or a baseline.
pub(super) enum SimulatedPolicy {
    Served(Policy),
    Baseline(Baseline),
}

impl SimulatedPolicy {
    /// Returns the shares of the models' first workers, in the order of the models.
    pub(super) fn initial(&self) -> Vec<Sms> {
        match self {
            Self::Served(policy) => policy.initial(),
            Self::Baseline(baseline) => baseline.initial(),
        }
    }

    pub(super) fn decide(&mut self, input: &PolicyInput) -> Decision {
        match self {
            Self::Served(policy) => policy.decide(input),
            Self::Baseline(baseline) => baseline.decide(input),
        }
    }
}

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("no layout `{name}` applies to these models; use `{LAYOUTS}` or one of {}", .known.join(", "))]
pub(super) struct NoSuchLayout {
    name: String,
    known: Vec<String>,
}

impl FromStr for PolicyArgument {
    type Err = UnknownBaseline;

    fn from_str(text: &str) -> Result<Self, UnknownBaseline> {
        if let Some(name) = text.strip_prefix(LAYOUT) {
            return Ok(Self::Layout(name.to_owned()));
        }
        if text == LAYOUTS {
            return Ok(Self::Layouts);
        }
        if let Ok(choice) = text.parse() {
            return Ok(Self::Policy { choice, never_pauses: false });
        }
        let choice = text.strip_suffix(NO_PREEMPTION_SUFFIX).and_then(|bare| bare.parse().ok());
        if let Some(choice) = choice.filter(|choice: &Choice| choice.preempts()) {
            return Ok(Self::Policy { choice, never_pauses: true });
        }
        let bare = [Choice::ADMISSION_SUFFIX, Choice::FORMER_SUFFIX];
        let bare = bare.into_iter().find_map(|suffix| text.strip_suffix(suffix));
        Ok(Self::Baseline { name: bare.unwrap_or(text).parse()?, refuses_late: bare.is_some() })
    }
}

impl fmt::Display for PolicyArgument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Policy { choice, never_pauses } => {
                write!(f, "{choice}{}", if *never_pauses { NO_PREEMPTION_SUFFIX } else { "" })
            }
            Self::Baseline { name, refuses_late } => {
                write!(f, "{name}{}", if *refuses_late { Choice::ADMISSION_SUFFIX } else { "" })
            }
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
        let one = |policy, pauses| Ok(vec![NamedPolicy { name: self.to_string(), pauses, policy }]);
        match self {
            Self::Policy { choice, never_pauses } => {
                let policy = Policy::new(*choice, &gpus, &terms);
                return one(SimulatedPolicy::Served(policy), choice.preempts() && !never_pauses);
            }
            Self::Baseline { name, refuses_late } => {
                let baseline = Baseline::new(*name, *refuses_late, &gpus, &terms);
                return one(SimulatedPolicy::Baseline(baseline), false);
            }
            Self::Layouts | Self::Layout(_) => {}
        }
        let work = work(scenario, arrivals, seconds);
        let all = Baseline::layouts(&gpus, &terms, &work);
        let is_selected = |pattern: &&Pattern| match self {
            Self::Layout(name) => pattern.to_string() == *name,
            _ => true,
        };
        let named = |pattern: &Pattern| NamedPolicy {
            name: format!("{LAYOUT}{pattern}"),
            pauses: false,
            policy: SimulatedPolicy::Baseline(Baseline::of_layout(*pattern, &gpus, &terms, &work)),
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
