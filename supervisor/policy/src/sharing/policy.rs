//! A common interface to all sharing policies.

use shadowslice_shared::contention::SharedGpu;
use shadowslice_shared::units::Sms;
use std::fmt;
use std::str::FromStr;

use super::adaptive::Adaptive;
use super::baselines::{FixedLayouts, FixedShares, Gpulet, Gslice};
use super::changes::{ShareTarget, plan_changes};
use super::{Choice, Decision, ModelSpec, Pattern, PolicyInput};

/// The name of a sharing policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PolicyName {
    /// The policy of this project. It uses plain MPS until a model violates its SLO, and then looks for
    /// the best layout.
    Adaptive,
    /// Every model may use the whole GPU.
    Unpartitioned,
    /// Every model has its configured share.
    Static,
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

impl PolicyName {
    /// All policies. The adaptive policy is the first.
    pub const ALL: [Self; 8] = [
        Self::Adaptive,
        Self::Unpartitioned,
        Self::Static,
        Self::Equal,
        Self::Half,
        Self::PriorityHalf,
        Self::Gslice,
        Self::Gpulet,
    ];

    /// Returns the name of the policy in the configuration.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Adaptive => "adaptive",
            Self::Unpartitioned => "unpartitioned",
            Self::Static => "static",
            Self::Equal => "equal",
            Self::Half => "half",
            Self::PriorityHalf => "priority-half",
            Self::Gslice => "gslice",
            Self::Gpulet => "gpulet",
        }
    }
}

impl fmt::Display for PolicyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is not a policy; give adaptive, unpartitioned, static, equal, half, priority-half, gslice or gpulet"
)]
/// The error for a name that is not a policy. It contains the name.
pub struct UnknownPolicy(pub String);

impl FromStr for PolicyName {
    type Err = UnknownPolicy;

    fn from_str(word: &str) -> Result<Self, UnknownPolicy> {
        let found = Self::ALL.into_iter().find(|kind| kind.name() == word);
        found.ok_or_else(|| UnknownPolicy(word.to_owned()))
    }
}

/// A sharing policy with its state.
#[derive(Debug, Clone)]
pub struct Policy {
    /// True if requests that cannot be answered in time are refused, even if the rule does not refuse
    /// them.
    refuses_late: bool,
    gpus: Vec<SharedGpu>,
    specs: Vec<ModelSpec>,
    rule: Rule,
}

#[derive(Debug, Clone)]
enum Rule {
    Adaptive(Adaptive),
    Fixed(FixedShares),
    FixedLayouts(FixedLayouts),
    Gslice(Gslice),
    Gpulet(Gpulet),
}

impl Policy {
    /// Creates a policy for these GPUs and models.
    ///
    /// # Panics
    ///
    /// Panics if a model's GPU is not among `gpus`.
    pub fn new(choice: Choice, gpus: &[SharedGpu], specs: &[ModelSpec]) -> Self {
        assert!(specs.iter().all(|spec| spec.gpu < gpus.len()), "every model's GPU must exist");
        let sms: Vec<Sms> = gpus.iter().map(|gpu| gpu.sms).collect();
        let sms = sms.as_slice();
        let rule = match choice.kind {
            PolicyName::Adaptive => Rule::Adaptive(Adaptive::new(gpus, specs)),
            PolicyName::Unpartitioned => Rule::Fixed(FixedShares::unpartitioned(sms, specs)),
            PolicyName::Static => Rule::Fixed(FixedShares::as_configured(specs)),
            PolicyName::Equal => Rule::Fixed(FixedShares::equal(sms, specs)),
            PolicyName::Half => Rule::Fixed(FixedShares::half(sms, specs)),
            PolicyName::PriorityHalf => Rule::Fixed(FixedShares::priority_half(sms, specs)),
            PolicyName::Gslice => Rule::Gslice(Gslice::new(specs)),
            PolicyName::Gpulet => Rule::Gpulet(Gpulet::new(specs)),
        };
        Self { refuses_late: choice.refuses_late, specs: specs.to_vec(), rule, gpus: gpus.to_vec() }
    }

    /// Returns a policy that keeps one of the adaptive policy's layouts and refuses late requests.
    /// `work` is the fraction of its GPU that each model's requests need, 0 to 1.
    ///
    /// # Panics
    ///
    /// Panics if a model's GPU is not among `gpus`, or if `work` has too few entries.
    pub fn of_layout(pattern: Pattern, gpus: &[SharedGpu], specs: &[ModelSpec], work: &[f64]) -> Self {
        let rule = Rule::FixedLayouts(FixedLayouts::new(pattern, gpus, specs, work));
        Self { refuses_late: true, specs: specs.to_vec(), rule, gpus: gpus.to_vec() }
    }

    /// Returns the layouts of the adaptive policy that apply to these models. Excludes the layout with
    /// the initial shares.
    pub fn layouts(gpus: &[SharedGpu], specs: &[ModelSpec], work: &[f64]) -> Vec<Pattern> {
        FixedLayouts::patterns(gpus.len(), specs, work)
    }

    /// Copies the state of an earlier policy for each GPU that still has the same models. `places`
    /// contains the index of each model in the earlier policy. All other GPUs start without state.
    #[must_use]
    pub fn remembering(mut self, earlier: &Self, places: &[Option<usize>]) -> Self {
        if let (Rule::Adaptive(ours), Rule::Adaptive(theirs)) = (&mut self.rule, &earlier.rule) {
            for (gpu, shape) in self.gpus.iter().enumerate() {
                let of = |specs: &[ModelSpec]| specs.iter().filter(|spec| spec.gpu == gpu).count();
                let here = || (0..self.specs.len()).filter(|&model| self.specs[model].gpu == gpu);
                let place = |model: usize| places.get(model).copied().flatten();
                let is_same = |model: usize| {
                    place(model).is_some_and(|place| earlier.specs.get(place) == Some(&self.specs[model]))
                };
                if earlier.gpus.get(gpu) == Some(shape)
                    && of(&earlier.specs) == here().count()
                    && here().all(is_same)
                {
                    ours.remember(theirs, gpu, &self.specs, place);
                }
            }
        }
        self
    }

    /// Returns the shares of the models' first workers, in the order of the models.
    pub fn initial(&self) -> Vec<Sms> {
        let wanted: Vec<Sms> = match &self.rule {
            Rule::Fixed(fixed) => fixed.shares().to_vec(),
            Rule::FixedLayouts(fixed) => fixed.shares(&self.specs),
            Rule::Adaptive(adaptive) => adaptive.shares(&self.specs),
            Rule::Gslice(_) | Rule::Gpulet(_) => self.specs.iter().map(|spec| spec.initial).collect(),
        };
        wanted.iter().zip(&self.specs).map(|(&sms, spec)| spec.share_for(sms)).collect()
    }

    /// Decides the shares and the admission of all models. Call this once per interval.
    pub fn decide(&mut self, input: &PolicyInput) -> Decision {
        let mut targets: Vec<ShareTarget> = match &mut self.rule {
            Rule::Adaptive(adaptive) => adaptive.decide(&self.specs, input),
            Rule::Fixed(fixed) => fixed.decide(&self.specs),
            Rule::FixedLayouts(fixed) => fixed.decide(&self.specs, input),
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
    fn every_policy_is_found_by_its_name() {
        for kind in PolicyName::ALL {
            assert_eq!(kind.to_string().parse(), Ok(kind));
        }
        assert!("Adaptive".parse::<PolicyName>().is_err());
    }
}
