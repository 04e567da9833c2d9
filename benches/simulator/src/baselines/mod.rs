//! The baselines: policies with which evaluations compare the supervisor's policies. They are constant
//! shares, two published policies (GSLICE, gpulet), and fixed layouts of the policy `adaptive`.

mod fixed;
mod fixed_layouts;
#[cfg(test)]
mod fixtures;
mod gpulet;
mod gslice;

use std::fmt;
use std::str::FromStr;

use shadowslice_policy::sharing::{Decision, ModelSpec, Pattern, PolicyInput, plan_changes};
use shadowslice_shared::contention::SharedGpu;
use shadowslice_shared::units::Sms;

use fixed::FixedShares;
use fixed_layouts::FixedLayouts;
use gpulet::Gpulet;
use gslice::Gslice;

/// The name of a baseline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BaselineName {
    /// Every model may use the whole GPU.
    Unpartitioned,
    /// Every model has an equal share of the GPU.
    Equal,
    /// Every model has twice the equal share, as NVIDIA recommends.
    Half,
    /// Models with the highest priority have the whole GPU, and all other models half of it.
    PriorityHalf,
    /// The self-tuning shares of GSLICE (SoCC 2020).
    Gslice,
    /// The partitions and epochs of gpulet (USENIX ATC 2022).
    Gpulet,
}

impl BaselineName {
    const ALL: [Self; 6] =
        [Self::Unpartitioned, Self::Equal, Self::Half, Self::PriorityHalf, Self::Gslice, Self::Gpulet];

    const fn name(self) -> &'static str {
        match self {
            Self::Unpartitioned => "unpartitioned",
            Self::Equal => "equal",
            Self::Half => "half",
            Self::PriorityHalf => "priority-half",
            Self::Gslice => "gslice",
            Self::Gpulet => "gpulet",
        }
    }
}

impl fmt::Display for BaselineName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The error for a name that is neither a policy of the supervisor nor a baseline. It contains the name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not a policy; use adaptive, static, unpartitioned, equal, half, priority-half, gslice or gpulet"
)]
pub struct UnknownBaseline(String);

impl FromStr for BaselineName {
    type Err = UnknownBaseline;

    fn from_str(word: &str) -> Result<Self, UnknownBaseline> {
        let found = Self::ALL.into_iter().find(|name| name.name() == word);
        found.ok_or_else(|| UnknownBaseline(word.to_owned()))
    }
}

/// A baseline with its state.
#[derive(Debug, Clone)]
pub struct Baseline {
    /// True if requests that cannot be answered in time are refused.
    refuses_late: bool,
    specs: Vec<ModelSpec>,
    rule: Rule,
}

#[derive(Debug, Clone)]
enum Rule {
    Fixed(FixedShares),
    Layouts(FixedLayouts),
    Gslice(Gslice),
    Gpulet(Gpulet),
}

impl Baseline {
    /// Creates a baseline for these GPUs and models.
    pub fn new(name: BaselineName, refuses_late: bool, gpus: &[SharedGpu], specs: &[ModelSpec]) -> Self {
        let sms: Vec<Sms> = gpus.iter().map(|gpu| gpu.sms).collect();
        let rule = match name {
            BaselineName::Unpartitioned => Rule::Fixed(FixedShares::unpartitioned(&sms, specs)),
            BaselineName::Equal => Rule::Fixed(FixedShares::equal(&sms, specs)),
            BaselineName::Half => Rule::Fixed(FixedShares::half(&sms, specs)),
            BaselineName::PriorityHalf => Rule::Fixed(FixedShares::priority_half(&sms, specs)),
            BaselineName::Gslice => Rule::Gslice(Gslice::new(specs)),
            BaselineName::Gpulet => Rule::Gpulet(Gpulet::new(specs)),
        };
        Self { refuses_late, specs: specs.to_vec(), rule }
    }

    /// Returns a baseline that keeps one of the adaptive policy's layouts and refuses late requests.
    /// `work` is the fraction of its GPU that each model's requests need, 0 to 1.
    pub fn of_layout(pattern: Pattern, gpus: &[SharedGpu], specs: &[ModelSpec], work: &[f64]) -> Self {
        let rule = Rule::Layouts(FixedLayouts::new(pattern, gpus, specs, work));
        Self { refuses_late: true, specs: specs.to_vec(), rule }
    }

    /// Returns the layouts of the adaptive policy that apply to these models. Excludes the layout with
    /// the initial shares.
    pub fn layouts(gpus: &[SharedGpu], specs: &[ModelSpec], work: &[f64]) -> Vec<Pattern> {
        FixedLayouts::patterns(gpus.len(), specs, work)
    }

    /// Returns the shares of the models' first workers, in the order of the models.
    pub fn initial(&self) -> Vec<Sms> {
        let wanted: Vec<Sms> = match &self.rule {
            Rule::Fixed(fixed) => fixed.shares().to_vec(),
            Rule::Layouts(fixed) => fixed.shares(&self.specs),
            Rule::Gslice(_) | Rule::Gpulet(_) => self.specs.iter().map(|spec| spec.initial).collect(),
        };
        wanted.iter().zip(&self.specs).map(|(&sms, spec)| spec.share_for(sms)).collect()
    }

    /// Decides the shares and the admission of all models.
    pub fn decide(&mut self, input: &PolicyInput) -> Decision {
        let mut targets = match &mut self.rule {
            Rule::Fixed(fixed) => fixed.decide(&self.specs),
            Rule::Layouts(fixed) => fixed.decide(&self.specs, input),
            Rule::Gslice(gslice) => gslice.decide(&self.specs, input),
            Rule::Gpulet(gpulet) => gpulet.decide(&self.specs, input),
        };
        for target in &mut targets {
            target.admission.refuse_late |= self.refuses_late;
        }
        plan_changes(&targets, &self.specs, input)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_baseline_is_found_by_its_name() {
        for name in BaselineName::ALL {
            assert_eq!(name.to_string().parse(), Ok(name));
        }
        assert!("Gslice".parse::<BaselineName>().is_err());
    }
}
