//! The assignment of models to the GPUs of one host, with one copy of each model.
//!
//! Every model gets a GPU, even if no GPU has enough free resources. Models that together use more SMs
//! than the GPU has can still share the GPU, but they run slower.

use std::cmp::Reverse;

use shadowslice_shared::units::Sms;

use super::{GpuCapacity, ModelCopies, Objective, Share, Shortage, place};

/// A model of the host, and the GPUs on which the model is allowed to run.
#[derive(Debug, Clone, PartialEq)]
pub enum HostTenant {
    /// A model for which the operator has chosen a GPU.
    Fixed {
        /// The index of the model's GPU.
        on: usize,
        /// The resources that the model needs.
        share: Share,
    },
    /// A model that is allowed to run on any GPU.
    Free {
        /// The index of the GPU on which the model is at present, or `None` for a new model.
        on: Option<usize>,
        /// The resources that the model needs.
        share: Share,
        /// The model's priority. 1 is the highest.
        priority: u32,
    },
}

/// The GPU assigned to a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuAssignment {
    /// The index of the GPU.
    pub gpu: usize,
    /// The reason why the model gets less on this GPU than it needs, or `None` if it gets enough.
    pub shortage: Option<Shortage>,
}

/// Returns the GPU of each model. A model moves to another GPU only if more models then get the
/// resources that they need. `gpus` must not be empty.
pub fn assign_gpus(gpus: &[GpuCapacity], tenants: &[HostTenant]) -> Vec<GpuAssignment> {
    let gpus: Vec<GpuCapacity> = gpus.iter().enumerate().map(|gpu| with_fixed(gpu, tenants)).collect();
    let placed = place(&gpus, &tenants.iter().map(copies_of).collect::<Vec<_>>(), Objective::FewMoves);
    let mut used: Vec<u32> = gpus.iter().map(|gpu| gpu.taken.sms.0).collect();
    for (tenant, on) in tenants.iter().zip(&placed.models) {
        on.iter().for_each(|&gpu| used[gpu] = used[gpu].saturating_add(tenant.share().sms.0));
    }
    let mut home = |(index, tenant): (usize, &HostTenant)| {
        if let Some(gpu) = tenant.fixed().or(placed.models[index].first().copied()) {
            return GpuAssignment { gpu, shortage: None };
        }
        let shortage =
            placed.missing.iter().find(|missing| missing.model == index).map(|missing| missing.shortage);
        let gpu = tenant.on().unwrap_or_else(|| roomiest(&gpus, &used));
        used[gpu] = used[gpu].saturating_add(tenant.share().sms.0);
        GpuAssignment { gpu, shortage }
    };
    tenants.iter().enumerate().map(&mut home).collect()
}

impl HostTenant {
    fn share(&self) -> &Share {
        match self {
            Self::Fixed { share, .. } | Self::Free { share, .. } => share,
        }
    }

    fn on(&self) -> Option<usize> {
        match self {
            Self::Fixed { on, .. } => Some(*on),
            Self::Free { on, .. } => *on,
        }
    }

    fn fixed(&self) -> Option<usize> {
        match self {
            Self::Fixed { on, .. } => Some(*on),
            Self::Free { .. } => None,
        }
    }
}

/// Returns the copies of a model to place. A model with a fixed GPU has no copies to place.
fn copies_of(tenant: &HostTenant) -> ModelCopies {
    match tenant {
        HostTenant::Fixed { .. } => {
            ModelCopies { copies: 0, each: Share::NOTHING, priority: 1, on: Vec::new() }
        }
        HostTenant::Free { on, share, priority } => {
            ModelCopies { copies: 1, each: *share, priority: *priority, on: on.iter().copied().collect() }
        }
    }
}

fn with_fixed((index, gpu): (usize, &GpuCapacity), tenants: &[HostTenant]) -> GpuCapacity {
    let here = tenants.iter().filter(|tenant| tenant.fixed() == Some(index)).map(HostTenant::share);
    let sum = |all: Share, each: &Share| Share {
        sms: Sms(all.sms.0.saturating_add(each.sms.0)),
        memory: all.memory.saturating_add(each.memory),
        shadow: all.shadow.max(each.shadow),
        bandwidth: all.bandwidth + each.bandwidth,
    };
    GpuCapacity { taken: here.fold(gpu.taken, sum), ..gpu.clone() }
}

/// Returns the GPU with the most unused SMs. If all GPUs are oversubscribed, returns the least
/// oversubscribed GPU.
fn roomiest(gpus: &[GpuCapacity], used: &[u32]) -> usize {
    let free = |&gpu: &usize| (i64::from(gpus[gpu].sms.0) - i64::from(used[gpu]), Reverse(gpu));
    (0..gpus.len()).max_by_key(free).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn gpu() -> GpuCapacity {
        GpuCapacity { host: 0, sms: Sms(132), memory: 80 * GIB, taken: Share::NOTHING }
    }

    fn share(sms: u32) -> Share {
        Share { sms: Sms(sms), memory: 4 * GIB, shadow: GIB, bandwidth: 0.1 }
    }

    fn free(on: Option<usize>, sms: u32) -> HostTenant {
        HostTenant::Free { on, share: share(sms), priority: 1 }
    }

    fn places(gpus: &[GpuCapacity], tenants: &[HostTenant]) -> Vec<usize> {
        assign_gpus(gpus, tenants).into_iter().map(|assignment| assignment.gpu).collect()
    }

    #[test]
    fn new_models_balance_the_gpus() {
        let [a, b] = [gpu(), gpu()];
        let tenants = [free(None, 64), free(None, 32), free(None, 32), free(None, 8)];
        let on = places(&[a, b], &tenants);
        assert!(on[1] == on[2] && on[0] != on[1], "64 beside 32 and 32: {on:?}");
    }

    #[test]
    fn models_stay_until_another_gpu_has_more_room() {
        let gpus = [gpu(), gpu()];
        assert_eq!(places(&gpus, &[free(Some(0), 60), free(Some(0), 60)]), [0, 0], "both have enough");
        let on = places(&gpus, &[free(Some(0), 80), free(Some(0), 80)]);
        assert_ne!(on[0], on[1], "one model moves");
        let crowded = assign_gpus(&gpus, &[free(Some(0), 100), free(Some(1), 100), free(Some(1), 60)]);
        let on: Vec<usize> = crowded.iter().map(|assignment| assignment.gpu).collect();
        assert_eq!(on, [0, 1, 1], "no move helps");
        let shortage: Vec<&Shortage> =
            crowded.iter().filter_map(|assignment| assignment.shortage.as_ref()).collect();
        assert!(matches!(shortage[..], [Shortage::Sms { .. }]), "{shortage:?}");
    }

    #[test]
    fn fixed_models_stay_and_count() {
        let fixed = HostTenant::Fixed { on: 0, share: share(40) };
        assert_eq!(places(&[gpu(), gpu()], &[fixed.clone(), free(None, 8)]), [0, 1]);
        let over = HostTenant::Fixed { on: 0, share: share(400) };
        assert_eq!(places(&[gpu(), gpu()], &[over, free(None, 140)]), [0, 1], "on the GPU with more left");
        let large = HostTenant::Fixed { on: 0, share: Share { memory: 79 * GIB, ..share(8) } };
        assert_eq!(
            places(&[gpu(), gpu()], &[large, fixed, free(Some(0), 8)]),
            [0, 0, 1],
            "the memory decides"
        );
    }

    #[test]
    fn a_model_that_fits_nowhere_gets_the_gpu_with_the_most_room() {
        let small = GpuCapacity { sms: Sms(66), ..gpu() };
        assert_eq!(places(&[small, gpu()], &[free(None, 200), free(None, 200), free(None, 200)]), [1, 0, 1]);
        assert_eq!(places(&[gpu(), gpu()], &[free(Some(1), 200)]), [1], "a placed model stays");
    }
}
