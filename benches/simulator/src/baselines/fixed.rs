//! Policies with constant shares.

use shadowslice_policy::sharing::{ModelSpec, ShareTarget};
use shadowslice_shared::units::{Percent, Sms};

/// The constant share of each model.
#[derive(Debug, Clone)]
pub(super) struct FixedShares {
    shares: Vec<Sms>,
}

impl FixedShares {
    /// Gives the whole GPU to every model, like MPS without configuration.
    pub(super) fn unpartitioned(gpus: &[Sms], specs: &[ModelSpec]) -> Self {
        Self { shares: specs.iter().map(|spec| gpus[spec.gpu]).collect() }
    }

    /// Gives 100 %/n to each of n models. NVIDIA's MPS documentation calls this the common strategy, in
    /// "Volta MPS Execution Resource Provisioning".
    pub(super) fn equal(gpus: &[Sms], specs: &[ModelSpec]) -> Self {
        Self::divided(gpus, specs, 100)
    }

    /// Gives 100 %/(0.5 n) to each of n models. The same section of NVIDIA's documentation calls this a
    /// more optimal strategy, because the hardware can overlap the work of its clients.
    pub(super) fn half(gpus: &[Sms], specs: &[ModelSpec]) -> Self {
        Self::divided(gpus, specs, 200)
    }

    /// Gives the whole GPU to the models with the highest priority, and half of it to every other
    /// model. On an H200, this layout was better than all other layouts that were tried manually.
    pub(super) fn priority_half(gpus: &[Sms], specs: &[ModelSpec]) -> Self {
        let share = |model: &ModelSpec| {
            let gpu = gpus[model.gpu];
            let here = specs.iter().filter(|other| other.gpu == model.gpu);
            let is_first = here.map(|other| other.priority).min() == Some(model.priority);
            if is_first { gpu } else { Sms(gpu.0 / 2) }
        };
        Self { shares: specs.iter().map(share).collect() }
    }

    /// Divides `sum` percent equally among the models of each GPU, and rounds down.
    fn divided(gpus: &[Sms], specs: &[ModelSpec], sum: u32) -> Self {
        let share = |model: &ModelSpec| {
            let sharing = specs.iter().filter(|other| other.gpu == model.gpu).count() as u32;
            let percent = Percent::new((sum / sharing).clamp(1, 100)).expect("clamped to 1..=100");
            percent.sms_of(gpus[model.gpu])
        };
        Self { shares: specs.iter().map(share).collect() }
    }

    pub(super) fn shares(&self) -> &[Sms] {
        &self.shares
    }

    pub(super) fn decide(&self, specs: &[ModelSpec]) -> Vec<ShareTarget> {
        let target = |(&sms, spec): (&Sms, &ModelSpec)| ShareTarget::plain(sms, spec.max_batch);
        self.shares.iter().zip(specs).map(target).collect()
    }
}
