//! The virtual times of the tenants for one priority of a GPU.

use super::{TenantId, TenantSet};

#[derive(Debug)]
pub(super) struct FairClock {
    /// The virtual time of each tenant, in SM·s per unit of weight.
    used: Vec<f64>,
    /// The tenants with requests.
    active: TenantSet,
    /// The virtual time at which an idle tenant starts. It never decreases.
    start: f64,
}

impl FairClock {
    pub(super) fn new(tenants: usize) -> Self {
        Self { used: vec![0.0; tenants], active: TenantSet::default(), start: 0.0 }
    }

    pub(super) fn used(&self) -> &[f64] {
        &self.used
    }

    /// Adds SM time of a tenant, divided by its weight.
    pub(super) fn add(&mut self, tenant: TenantId, weighted: f64) {
        if let Some(used) = self.used.get_mut(tenant.index()) {
            *used += weighted;
        }
    }

    /// Records which tenants have requests now.
    pub(super) fn set_active(&mut self, active: TenantSet) {
        if active == self.active {
            return;
        }
        let of = |tenants: TenantSet| tenants.iter().filter_map(|tenant| self.used.get(tenant.index()));
        let least = of(self.active).copied().reduce(f64::min);
        // After an idle period, all tenants start at the same virtual time.
        let most = if active.is_empty() { of(self.active).copied().reduce(f64::max) } else { least };
        self.start = self.start.max(most.unwrap_or_default());
        for tenant in active.minus(self.active).iter() {
            if let Some(used) = self.used.get_mut(tenant.index()) {
                *used = used.max(self.start);
            }
        }
        self.active = active;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: TenantId = TenantId(0);
    const B: TenantId = TenantId(1);

    fn set(tenants: &[TenantId]) -> TenantSet {
        tenants.iter().copied().collect()
    }

    #[test]
    fn a_tenant_that_was_idle_has_neither_credit_nor_debt() {
        let mut clock = FairClock::new(2);
        clock.set_active(set(&[A]));
        clock.add(A, 100.0);
        clock.set_active(set(&[A, B]));
        assert_eq!(clock.used(), [100.0, 100.0], "B's unused time is lent");
        clock.add(B, 7.0);
        clock.set_active(set(&[]));
        clock.set_active(set(&[A]));
        assert_eq!(clock.used(), [107.0, 107.0], "the GPU was idle");
    }

    #[test]
    fn a_tenant_cannot_lose_its_debt_by_a_moment_without_requests() {
        let mut clock = FairClock::new(2);
        clock.set_active(set(&[A, B]));
        clock.add(A, 5.0);
        clock.set_active(set(&[B]));
        clock.add(B, 1.0);
        clock.set_active(set(&[A, B]));
        assert_eq!(clock.used(), [5.0, 1.0]);
    }
}
