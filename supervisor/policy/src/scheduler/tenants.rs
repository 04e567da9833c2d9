//! Methods of the scheduler about the tenants of its requests.

use super::Scheduler;
use super::messages::{RefusalReason, RefusedRequest, Ticket};
use crate::tenants::{TenantId, TenantSet, TenantTurns};

impl<K: Ord + Clone, T: Ticket> Scheduler<K, T> {
    /// Sets the turns of the tenants for the next batches.
    pub fn set_turns(&mut self, turns: TenantTurns) {
        self.turns = turns;
    }

    /// Returns the tenants with queued requests.
    pub fn queued_tenants(&self) -> TenantSet {
        self.queues.tenants()
    }

    /// Removes and returns the last request of the tenant with the most requests for its weight, to make room
    /// for a request of `tenant`. Returns `None` if `tenant` itself has no fewer, or if that request does not
    /// make `enough` room.
    pub fn displace(
        &mut self,
        tenant: TenantId,
        why: RefusalReason,
        enough: impl Fn(&T) -> bool,
    ) -> Option<RefusedRequest<K, T>> {
        let request = self.queues.displace(tenant, &self.turns, enough)?;
        Some(RefusedRequest { request, why })
    }
}
