//! One copy of each model on the GPUs of one host. All get a place, also where none has room: a GPU
//! can be shared by models that together would use more SMs than it has, and they are slower then.

use std::cmp::Reverse;

use shadowslice_shared::units::Sms;

use super::{Aim, Gpu, Lacks, Model, Share, place};

/// A model, and where it may be.
#[derive(Debug, Clone, PartialEq)]
pub enum Tenant {
    /// Where the operator put it.
    Fixed { on: usize, share: Share },
    /// Anywhere; `on` is where it is. 1 is the highest priority.
    Free { on: Option<usize>, share: Share, priority: u32 },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settled {
    pub gpu: usize,
    /// Why it has less there than it needs.
    pub lacks: Option<Lacks>,
}

/// Of each tenant its GPU. Those that are somewhere stay, unless their moving lets more models have
/// what they need. There must be a GPU.
pub fn settle(gpus: &[Gpu], tenants: &[Tenant]) -> Vec<Settled> {
    let gpus: Vec<Gpu> = gpus.iter().enumerate().map(|gpu| with_fixed(gpu, tenants)).collect();
    let placed = place(&gpus, &tenants.iter().map(wish).collect::<Vec<_>>(), Aim::FewMoves);
    let mut used: Vec<u32> = gpus.iter().map(|gpu| gpu.taken.sms.0).collect();
    for (tenant, on) in tenants.iter().zip(&placed.models) {
        on.iter().for_each(|&gpu| used[gpu] = used[gpu].saturating_add(tenant.share().sms.0));
    }
    let mut home = |(index, tenant): (usize, &Tenant)| {
        if let Some(gpu) = tenant.fixed().or(placed.models[index].first().copied()) {
            return Settled { gpu, lacks: None };
        }
        let lacks = placed.missing.iter().find(|missing| missing.model == index).map(|missing| missing.lacks);
        let gpu = tenant.on().unwrap_or_else(|| roomiest(&gpus, &used));
        used[gpu] = used[gpu].saturating_add(tenant.share().sms.0);
        Settled { gpu, lacks }
    };
    tenants.iter().enumerate().map(&mut home).collect()
}

impl Tenant {
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

/// A fixed model asks for no copy: its GPU has it.
fn wish(tenant: &Tenant) -> Model {
    match tenant {
        Tenant::Fixed { .. } => Model { copies: 0, each: Share::NOTHING, priority: 1, on: Vec::new() },
        Tenant::Free { on, share, priority } => {
            Model { copies: 1, each: *share, priority: *priority, on: on.iter().copied().collect() }
        }
    }
}

fn with_fixed((index, gpu): (usize, &Gpu), tenants: &[Tenant]) -> Gpu {
    let here = tenants.iter().filter(|tenant| tenant.fixed() == Some(index)).map(Tenant::share);
    let sum = |all: Share, each: &Share| Share {
        sms: Sms(all.sms.0.saturating_add(each.sms.0)),
        memory: all.memory.saturating_add(each.memory),
        shadow: all.shadow.max(each.shadow),
        bandwidth: all.bandwidth + each.bandwidth,
    };
    Gpu { taken: here.fold(gpu.taken, sum), ..gpu.clone() }
}

/// The GPU with most SMs that nobody uses, or the fewest that are used twice.
fn roomiest(gpus: &[Gpu], used: &[u32]) -> usize {
    let free = |&gpu: &usize| (i64::from(gpus[gpu].sms.0) - i64::from(used[gpu]), Reverse(gpu));
    (0..gpus.len()).max_by_key(free).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn gpu() -> Gpu {
        Gpu { host: 0, sms: Sms(132), memory: 80 * GIB, taken: Share::NOTHING }
    }

    fn share(sms: u32) -> Share {
        Share { sms: Sms(sms), memory: 4 * GIB, shadow: GIB, bandwidth: 0.1 }
    }

    fn free(on: Option<usize>, sms: u32) -> Tenant {
        Tenant::Free { on, share: share(sms), priority: 1 }
    }

    fn places(gpus: &[Gpu], tenants: &[Tenant]) -> Vec<usize> {
        settle(gpus, tenants).into_iter().map(|settled| settled.gpu).collect()
    }

    #[test]
    fn models_that_start_get_alike_parts_of_the_gpus() {
        let [a, b] = [gpu(), gpu()];
        let tenants = [free(None, 64), free(None, 32), free(None, 32), free(None, 8)];
        let on = places(&[a, b], &tenants);
        assert!(on[1] == on[2] && on[0] != on[1], "64 beside 32 and 32: {on:?}");
    }

    #[test]
    fn models_stay_until_one_lacks_what_another_gpu_has() {
        let gpus = [gpu(), gpu()];
        assert_eq!(places(&gpus, &[free(Some(0), 60), free(Some(0), 60)]), [0, 0], "crowded, and enough");
        let on = places(&gpus, &[free(Some(0), 80), free(Some(0), 80)]);
        assert_ne!(on[0], on[1], "one of them moves");
        let crowded = settle(&gpus, &[free(Some(0), 100), free(Some(1), 100), free(Some(1), 60)]);
        let on: Vec<usize> = crowded.iter().map(|settled| settled.gpu).collect();
        assert_eq!(on, [0, 1, 1], "nothing is better");
        let lacks: Vec<&Lacks> = crowded.iter().filter_map(|settled| settled.lacks.as_ref()).collect();
        assert!(matches!(lacks[..], [Lacks::Sms { .. }]), "{lacks:?}");
    }

    #[test]
    fn fixed_models_stay_and_count() {
        let fixed = Tenant::Fixed { on: 0, share: share(40) };
        assert_eq!(places(&[gpu(), gpu()], &[fixed.clone(), free(None, 8)]), [0, 1]);
        let over = Tenant::Fixed { on: 0, share: share(400) };
        assert_eq!(places(&[gpu(), gpu()], &[over, free(None, 140)]), [0, 1], "on the GPU with more left");
        let large = Tenant::Fixed { on: 0, share: Share { memory: 79 * GIB, ..share(8) } };
        assert_eq!(places(&[gpu(), gpu()], &[large, fixed, free(Some(0), 8)]), [0, 0, 1], "for its memory");
    }

    #[test]
    fn what_fits_nowhere_goes_where_most_is_free() {
        let small = Gpu { sms: Sms(66), ..gpu() };
        assert_eq!(places(&[small, gpu()], &[free(None, 200), free(None, 200), free(None, 200)]), [1, 0, 1]);
        assert_eq!(places(&[gpu(), gpu()], &[free(Some(1), 200)]), [1], "one that is somewhere stays");
    }
}
