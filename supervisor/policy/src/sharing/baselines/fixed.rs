//! Policies whose shares never change.

use shadowslice_shared::units::{Percent, Sms};

use super::super::ModelSpec;
use super::super::changes::ShareTarget;

/// The share of each model.
#[derive(Debug, Clone)]
pub(in super::super) struct FixedShares {
    shares: Vec<Sms>,
}

impl FixedShares {
    /// Gives every model the whole GPU: MPS without configuration.
    pub(in super::super) fn unpartitioned(gpus: &[Sms], specs: &[ModelSpec]) -> Self {
        Self { shares: specs.iter().map(|spec| gpus[spec.gpu]).collect() }
    }

    /// Gives every model its configured share.
    pub(in super::super) fn as_configured(specs: &[ModelSpec]) -> Self {
        Self { shares: specs.iter().map(|spec| spec.initial).collect() }
    }

    /// Gives 100 %/n to each of n models. NVIDIA's MPS documentation, "Volta MPS Execution Resource
    /// Provisioning", calls this the common strategy.
    pub(in super::super) fn equal(gpus: &[Sms], specs: &[ModelSpec]) -> Self {
        Self::divided(gpus, specs, 100)
    }

    /// Gives 100 %/(0.5 n) to each of n models. The same page calls this a more optimal strategy,
    /// because the hardware can overlap the work of its clients.
    pub(in super::super) fn half(gpus: &[Sms], specs: &[ModelSpec]) -> Self {
        Self::divided(gpus, specs, 200)
    }

    /// Gives the first priority the whole GPU and every other model half of it. This layout was
    /// found by hand on an H200 and beat the others there.
    pub(in super::super) fn priority_half(gpus: &[Sms], specs: &[ModelSpec]) -> Self {
        let share = |model: &ModelSpec| {
            let gpu = gpus[model.gpu];
            let here = specs.iter().filter(|other| other.gpu == model.gpu);
            let is_first = here.map(|other| other.priority).min() == Some(model.priority);
            if is_first { gpu } else { Sms(gpu.0 / 2) }
        };
        Self { shares: specs.iter().map(share).collect() }
    }

    /// Divides `sum` percent among the models of each GPU, rounded down.
    fn divided(gpus: &[Sms], specs: &[ModelSpec], sum: u32) -> Self {
        let share = |model: &ModelSpec| {
            let sharing = specs.iter().filter(|other| other.gpu == model.gpu).count() as u32;
            let percent = Percent::new((sum / sharing).clamp(1, 100)).expect("clamped to 1..=100");
            percent.sms_of(gpus[model.gpu])
        };
        Self { shares: specs.iter().map(share).collect() }
    }

    pub(in super::super) fn shares(&self) -> &[Sms] {
        &self.shares
    }

    pub(in super::super) fn decide(&self, specs: &[ModelSpec]) -> Vec<ShareTarget> {
        let target = |(&sms, spec): (&Sms, &ModelSpec)| ShareTarget::plain(sms, spec.max_batch);
        self.shares.iter().zip(specs).map(target).collect()
    }
}
