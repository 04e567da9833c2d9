//! The policies behind one interface.

use shadowslice_shared::contention::SharedGpu;
use shadowslice_shared::units::Sms;
use std::fmt;
use std::str::FromStr;

use super::adaptive::Adaptive;
use super::baselines::{Fixed, FixedLayouts, Gpulet, Gslice};
use super::difference::{Target, towards};
use super::{Choice, Decision, Facts, Pattern, Terms};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PolicyName {
    /// This project's own: plain MPS until a model violates its objective, then the best layout.
    Adaptive,
    /// Every model may use the whole GPU.
    Unpartitioned,
    /// As configured.
    Static,
    /// The GPU divided by the number of its models.
    Equal,
    /// Twice the equal share, as NVIDIA advises.
    Half,
    /// The first priority everywhere, every other model half of the GPU.
    PriorityHalf,
    Gslice,
    Gpulet,
}

impl PolicyName {
    /// The policy under test comes first.
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
pub struct UnknownPolicy(pub String);

impl FromStr for PolicyName {
    type Err = UnknownPolicy;

    fn from_str(word: &str) -> Result<Self, UnknownPolicy> {
        let found = Self::ALL.into_iter().find(|kind| kind.name() == word);
        found.ok_or_else(|| UnknownPolicy(word.to_owned()))
    }
}

#[derive(Debug, Clone)]
pub struct Policy {
    /// Requests that cannot be answered in time are turned away, whatever the rule says.
    refuses_late: bool,
    gpus: Vec<SharedGpu>,
    terms: Vec<Terms>,
    rule: Rule,
}

#[derive(Debug, Clone)]
enum Rule {
    Adaptive(Adaptive),
    Fixed(Fixed),
    FixedLayouts(FixedLayouts),
    Gslice(Gslice),
    Gpulet(Gpulet),
}

impl Policy {
    /// # Panics
    ///
    /// If a model's GPU is not among `gpus`.
    pub fn new(choice: Choice, gpus: &[SharedGpu], terms: &[Terms]) -> Self {
        assert!(terms.iter().all(|terms| terms.gpu < gpus.len()), "every model's GPU must exist");
        let sms: Vec<Sms> = gpus.iter().map(|gpu| gpu.sms).collect();
        let sms = sms.as_slice();
        let rule = match choice.kind {
            PolicyName::Adaptive => Rule::Adaptive(Adaptive::new(gpus, terms)),
            PolicyName::Unpartitioned => Rule::Fixed(Fixed::unpartitioned(sms, terms)),
            PolicyName::Static => Rule::Fixed(Fixed::as_configured(terms)),
            PolicyName::Equal => Rule::Fixed(Fixed::equal(sms, terms)),
            PolicyName::Half => Rule::Fixed(Fixed::half(sms, terms)),
            PolicyName::PriorityHalf => Rule::Fixed(Fixed::priority_half(sms, terms)),
            PolicyName::Gslice => Rule::Gslice(Gslice::new(terms)),
            PolicyName::Gpulet => Rule::Gpulet(Gpulet::new(terms)),
        };
        Self { refuses_late: choice.refuses_late, terms: terms.to_vec(), rule, gpus: gpus.to_vec() }
    }

    /// Returns a policy that keeps one layout of the adaptive policy's family, with admission.
    /// `work` is the part of its GPU that each model's requests take, 0 to 1.
    ///
    /// # Panics
    ///
    /// If a model's GPU is not among `gpus`, or a model has no work.
    pub fn of_layout(pattern: Pattern, gpus: &[SharedGpu], terms: &[Terms], work: &[f64]) -> Self {
        let rule = Rule::FixedLayouts(FixedLayouts::new(pattern, gpus, terms, work));
        Self { refuses_late: true, terms: terms.to_vec(), rule, gpus: gpus.to_vec() }
    }

    /// Returns the layouts of the adaptive policy that apply to these models, besides the one at rest.
    pub fn layouts(gpus: &[SharedGpu], terms: &[Terms], work: &[f64]) -> Vec<Pattern> {
        FixedLayouts::patterns(gpus.len(), terms, work)
    }

    /// Keeps what an earlier policy knew of each GPU that still has the same models; `places` says
    /// where each model was in the earlier policy. All else begins anew.
    #[must_use]
    pub fn remembering(mut self, earlier: &Self, places: &[Option<usize>]) -> Self {
        if let (Rule::Adaptive(ours), Rule::Adaptive(theirs)) = (&mut self.rule, &earlier.rule) {
            for (gpu, shape) in self.gpus.iter().enumerate() {
                let of = |terms: &[Terms]| terms.iter().filter(|terms| terms.gpu == gpu).count();
                let here = || (0..self.terms.len()).filter(|&model| self.terms[model].gpu == gpu);
                let place = |model: usize| places.get(model).copied().flatten();
                let is_same = |model: usize| {
                    place(model).is_some_and(|place| earlier.terms.get(place) == Some(&self.terms[model]))
                };
                if earlier.gpus.get(gpu) == Some(shape)
                    && of(&earlier.terms) == here().count()
                    && here().all(is_same)
                {
                    ours.remember(theirs, gpu, &self.terms, place);
                }
            }
        }
        self
    }

    /// For the models' first workers, in the models' order.
    pub fn initial(&self) -> Vec<Sms> {
        let wanted: Vec<Sms> = match &self.rule {
            Rule::Fixed(fixed) => fixed.shares().to_vec(),
            Rule::FixedLayouts(fixed) => fixed.shares(&self.terms),
            Rule::Adaptive(adaptive) => adaptive.shares(&self.terms),
            Rule::Gslice(_) | Rule::Gpulet(_) => self.terms.iter().map(|terms| terms.initial).collect(),
        };
        wanted.iter().zip(&self.terms).map(|(&sms, terms)| terms.within(sms)).collect()
    }

    /// Called once an interval.
    pub fn decide(&mut self, facts: &Facts) -> Decision {
        let mut targets: Vec<Target> = match &mut self.rule {
            Rule::Adaptive(adaptive) => adaptive.decide(&self.terms, facts),
            Rule::Fixed(fixed) => fixed.decide(&self.terms),
            Rule::FixedLayouts(fixed) => fixed.decide(&self.terms, facts),
            Rule::Gslice(gslice) => gslice.decide(&self.terms, facts),
            Rule::Gpulet(gpulet) => gpulet.decide(&self.terms, facts),
        };
        for target in &mut targets {
            target.door.refuse_late |= self.refuses_late;
        }
        towards(&targets, &self.terms, facts)
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
