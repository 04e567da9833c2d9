//! The sharing policies of the supervisor.

use shadowslice_shared::contention::SharedGpu;
use shadowslice_shared::units::Sms;
use std::fmt;
use std::str::FromStr;

use super::adaptive::Adaptive;
use super::changes::{ShareTarget, plan_changes};
use super::{Choice, Decision, ModelSpec, PolicyInput};

/// The name of a sharing policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PolicyName {
    /// Uses plain MPS until a model violates its SLO, and then looks for the best layout.
    Adaptive,
    /// Gives every model its configured share.
    Static,
}

impl PolicyName {
    /// All policies.
    pub const ALL: [Self; 2] = [Self::Adaptive, Self::Static];

    /// Returns the name of the policy in the configuration.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Adaptive => "adaptive",
            Self::Static => "static",
        }
    }
}

impl fmt::Display for PolicyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The error for a name that is not a policy. It contains the name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a policy; use adaptive or static")]
pub struct UnknownPolicy(pub String);

impl FromStr for PolicyName {
    type Err = UnknownPolicy;

    fn from_str(word: &str) -> Result<Self, UnknownPolicy> {
        let found = Self::ALL.into_iter().find(|name| name.name() == word);
        found.ok_or_else(|| UnknownPolicy(word.to_owned()))
    }
}

/// A sharing policy with its state.
#[derive(Debug, Clone)]
pub struct Policy {
    /// True if requests that cannot be answered in time are refused, even if `adaptive` does not refuse
    /// them.
    refuses_late: bool,
    gpus: Vec<SharedGpu>,
    specs: Vec<ModelSpec>,
    /// `None` keeps the configured shares.
    adaptive: Option<Adaptive>,
}

impl Policy {
    /// Creates a policy for these GPUs and models.
    ///
    /// # Panics
    ///
    /// Panics if a model's GPU is not among `gpus`.
    pub fn new(choice: Choice, gpus: &[SharedGpu], specs: &[ModelSpec]) -> Self {
        assert!(specs.iter().all(|spec| spec.gpu < gpus.len()), "every model's GPU must exist");
        let adaptive = (choice.kind == PolicyName::Adaptive).then(|| Adaptive::new(gpus, specs));
        Self { refuses_late: choice.refuses_late, gpus: gpus.to_vec(), specs: specs.to_vec(), adaptive }
    }

    /// Copies the state of an earlier policy for each GPU that still has the same models. `places`
    /// contains the index of each model in the earlier policy. All other GPUs start without state.
    #[must_use]
    pub fn remembering(mut self, earlier: &Self, places: &[Option<usize>]) -> Self {
        if let (Some(ours), Some(theirs)) = (&mut self.adaptive, &earlier.adaptive) {
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
        let wanted: Vec<Sms> = match &self.adaptive {
            Some(adaptive) => adaptive.shares(&self.specs),
            None => self.specs.iter().map(|spec| spec.initial).collect(),
        };
        wanted.iter().zip(&self.specs).map(|(&sms, spec)| spec.share_for(sms)).collect()
    }

    /// Decides the shares and the admission of all models. Call this once per interval.
    pub fn decide(&mut self, input: &PolicyInput) -> Decision {
        let configured = |spec: &ModelSpec| ShareTarget::plain(spec.initial, spec.max_batch);
        let mut targets: Vec<ShareTarget> = match &mut self.adaptive {
            Some(adaptive) => adaptive.decide(&self.specs, input),
            None => self.specs.iter().map(configured).collect(),
        };
        for target in &mut targets {
            target.admission.refuse_late |= self.refuses_late;
        }
        plan_changes(&targets, &self.specs, input)
    }
}
