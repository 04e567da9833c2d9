//! The virtual times of the tenants for one priority of a GPU.

use super::{TenantId, TenantSet};

#[derive(Debug)]
pub(super) struct FairClock {
    /// The virtual time of each tenant, in SM·s per unit of weight.
    used: Vec<f64>,
    /// The maximum arrears of each tenant behind the others, in SM·s per unit of weight.
    max_credit: Vec<f64>,
    /// The tenants with requests.
    active: TenantSet,
    /// The virtual time at which an idle tenant starts. It never decreases.
    start: f64,
}

impl FairClock {
    pub(super) fn new(max_credit: Vec<f64>) -> Self {
        let used = vec![0.0; max_credit.len()];
        Self { used, max_credit, active: TenantSet::default(), start: 0.0 }
    }

    pub(super) fn used(&self) -> &[f64] {
        &self.used
    }

    /// Adds SM time of a tenant, divided by its weight. A tenant that asks for less than its part falls
    /// behind, but by no more than its credit.
    pub(super) fn add(&mut self, tenant: TenantId, weighted: f64) {
        let Some(used) = self.used.get_mut(tenant.index()) else { return };
        *used += weighted;
        let most = *used;
        for (used, credit) in self.used.iter_mut().zip(&self.max_credit) {
            *used = used.max(most - credit);
        }
    }

    /// Records which tenants have requests now.
    pub(super) fn set_active(&mut self, active: TenantSet) {
        if active == self.active {
            return;
        }
        let of_active = self.active.iter().filter_map(|tenant| self.used.get(tenant.index()));
        // After an idle period, all tenants start at the same virtual time.
        let start = match active.is_empty() {
            true => self.used.iter().copied().reduce(f64::max),
            false => of_active.copied().reduce(f64::min),
        };
        self.start = self.start.max(start.unwrap_or_default());
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

    fn clock() -> FairClock {
        FairClock::new(vec![50.0, 20.0])
    }

    #[test]
    fn a_tenant_that_was_idle_has_neither_credit_nor_debt() {
        let mut clock = clock();
        clock.set_active(set(&[A]));
        clock.add(A, 100.0);
        clock.set_active(set(&[A, B]));
        assert_eq!(clock.used(), [100.0, 100.0], "B's unused time is lent");
        clock.add(B, 7.0);
        clock.set_active(set(&[A]));
        clock.set_active(set(&[]));
        clock.set_active(set(&[A]));
        assert_eq!(clock.used(), [107.0, 107.0], "the GPU was idle");
    }

    #[test]
    fn a_tenant_cannot_lose_its_debt_by_a_moment_without_requests() {
        let mut clock = clock();
        clock.set_active(set(&[A, B]));
        clock.add(A, 5.0);
        clock.set_active(set(&[B]));
        clock.add(B, 1.0);
        clock.set_active(set(&[A, B]));
        assert_eq!(clock.used(), [5.0, 1.0]);
    }

    #[test]
    fn a_tenant_that_always_asks_for_little_collects_a_limited_credit() {
        let mut clock = clock();
        clock.set_active(set(&[A, B]));
        for _ in 0..1_000 {
            clock.add(A, 7.0);
            clock.add(B, 1.0);
        }
        assert!((clock.used()[0] - clock.used()[1] - 20.0).abs() <= 1.0, "{:?}", clock.used());
    }
}
