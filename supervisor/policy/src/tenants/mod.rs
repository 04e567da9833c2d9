//! Fairness between tenants: whose requests run next, if several tenants ask for the same SMs.
//!
//! Each tenant has a virtual time, its SM time divided by its weight (start-time fair queueing, Goyal et al.,
//! SIGCOMM 1996). The tenant with the least virtual time runs first, so each tenant gets the part of the SM
//! time that corresponds to its weight. A tenant that was idle starts at the virtual time of the others.
//! It therefore lends its unused part, and gets no credit for it. A tenant that always asks for little gets
//! a limited credit.
//!
//! The scheduler of a model applies the virtual times to its own queue. Models of the same priority on the
//! same SMs have the same virtual times: a tenant that is ahead in one model waits in another one while a
//! tenant behind it has requests there.

mod board;
mod clock;

pub use board::{BoardMember, TenantBoard};

use std::time::Duration;

/// The maximum number of tenants, including the default tenant.
pub const MAX_TENANTS: usize = 64;

/// The index of a tenant in the list of tenants, below [`MAX_TENANTS`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct TenantId(pub u8);

impl TenantId {
    /// The tenant of requests that belong to no other tenant.
    pub const DEFAULT: Self = Self(0);

    /// Returns the index of the tenant.
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// A set of tenants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TenantSet(u64);

impl TenantSet {
    /// Returns true if the set contains the tenant.
    pub fn contains(self, tenant: TenantId) -> bool {
        self.0 >> tenant.0 & 1 == 1
    }

    /// Returns true if the set is empty.
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns the tenants of both sets.
    #[must_use]
    pub fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns the tenants that are not in the other set.
    #[must_use]
    pub fn minus(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Returns the tenants in ascending order.
    pub fn iter(self) -> impl Iterator<Item = TenantId> {
        (0..MAX_TENANTS as u8).map(TenantId).filter(move |&tenant| self.contains(tenant))
    }
}

impl FromIterator<TenantId> for TenantSet {
    fn from_iter<I: IntoIterator<Item = TenantId>>(tenants: I) -> Self {
        Self(tenants.into_iter().fold(0, |bits, tenant| bits | 1 << tenant.0))
    }
}

/// The turns of the tenants in the queue of one model.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct TenantTurns {
    /// The weight of each tenant, above 0.
    pub weights: Vec<f64>,
    /// The virtual time of each tenant, in SM·s per unit of weight.
    pub used: Vec<f64>,
    /// The tenants whose requests wait now, because they are ahead of tenants with requests for other
    /// models.
    pub held: TenantSet,
    /// The time after which the turns must be computed again, if tenants are held.
    pub held_for: Duration,
}

impl TenantTurns {
    /// Creates the turns of tenants with these weights, before any of them has used SM time.
    pub fn new(weights: &[f64]) -> Self {
        Self { weights: weights.to_vec(), used: vec![0.0; weights.len()], ..Self::default() }
    }

    /// Adds SM time to the virtual time of a tenant.
    pub(crate) fn add(&mut self, tenant: TenantId, sm_seconds: f64) {
        let weight = self.weight(tenant);
        if let Some(used) = self.used.get_mut(tenant.index()) {
            *used += sm_seconds / weight;
        }
    }

    pub(crate) fn weight(&self, tenant: TenantId) -> f64 {
        self.weights.get(tenant.index()).copied().unwrap_or(1.0)
    }

    pub(crate) fn used(&self, tenant: TenantId) -> f64 {
        self.used.get(tenant.index()).copied().unwrap_or_default()
    }
}
