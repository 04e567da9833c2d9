//! Shares that never change.

use shadowslice_shared::units::{Percent, Sms};

use super::super::Terms;
use super::super::difference::Target;

#[derive(Debug, Clone)]
pub(in super::super) struct Fixed {
    shares: Vec<Sms>,
}

impl Fixed {
    /// MPS as it is without configuration.
    pub(in super::super) fn unpartitioned(gpus: &[Sms], terms: &[Terms]) -> Self {
        Self { shares: terms.iter().map(|terms| gpus[terms.gpu]).collect() }
    }

    pub(in super::super) fn as_configured(terms: &[Terms]) -> Self {
        Self { shares: terms.iter().map(|terms| terms.initial).collect() }
    }

    /// NVIDIA's MPS documentation, "Volta MPS Execution Resource Provisioning", calls 100 %/n for
    /// each of n models the common strategy.
    pub(in super::super) fn equal(gpus: &[Sms], terms: &[Terms]) -> Self {
        Self::divided(gpus, terms, 100)
    }

    /// 100 %/(0.5 n) for each of n models: the same page's more optimal strategy, which lets the
    /// hardware overlap what its clients do.
    pub(in super::super) fn half(gpus: &[Sms], terms: &[Terms]) -> Self {
        Self::divided(gpus, terms, 200)
    }

    /// The first priority has the whole GPU and every other model half of it: one layout that was
    /// set by hand on an H200 and beat the others there.
    pub(in super::super) fn priority_half(gpus: &[Sms], terms: &[Terms]) -> Self {
        let share = |model: &Terms| {
            let gpu = gpus[model.gpu];
            let here = terms.iter().filter(|other| other.gpu == model.gpu);
            let is_first = here.map(|other| other.priority).min() == Some(model.priority);
            if is_first { gpu } else { Sms(gpu.0 / 2) }
        };
        Self { shares: terms.iter().map(share).collect() }
    }

    /// Rounded down.
    fn divided(gpus: &[Sms], terms: &[Terms], sum: u32) -> Self {
        let share = |model: &Terms| {
            let sharing = terms.iter().filter(|other| other.gpu == model.gpu).count() as u32;
            let percent = Percent::new((sum / sharing).clamp(1, 100)).expect("clamped to 1..=100");
            percent.sms_of(gpus[model.gpu])
        };
        Self { shares: terms.iter().map(share).collect() }
    }

    pub(in super::super) fn shares(&self) -> &[Sms] {
        &self.shares
    }

    pub(in super::super) fn decide(&self, terms: &[Terms]) -> Vec<Target> {
        let target = |(&sms, terms): (&Sms, &Terms)| Target::divided(sms, terms.max_batch);
        self.shares.iter().zip(terms).map(target).collect()
    }
}
