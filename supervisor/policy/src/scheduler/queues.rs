//! The queued requests of a model. Each priority has a queue for each tenant, ordered by deadline. Requests
//! with the highest priority run first.

use std::collections::BTreeMap;

use shadowslice_shared::units::Timestamp;

use super::batcher::NextBatch;
use super::queue::{QueuedRequest, RequestQueue};
use super::tenant_queues::{BatchTerms, TenantQueues};
use crate::tenants::{TenantId, TenantSet, TenantTurns};

/// The maximum number of priorities whose queues are kept when they are empty. Queues are kept because
/// more requests of the same priority are likely.
const KEPT_LEVELS: usize = 8;

/// The queues of all priorities. A batch contains only requests of one priority.
#[derive(Debug)]
pub(super) struct PriorityQueues<K, T> {
    max_requests: usize,
    waiting: usize,
    /// The queues by priority level. If there are more than [`KEPT_LEVELS`] queues, the empty queues
    /// are removed.
    levels: BTreeMap<u64, TenantQueues<K, T>>,
}

impl<K: Ord + Clone, T> PriorityQueues<K, T> {
    pub(super) fn new(max_requests: usize) -> Self {
        Self { max_requests, waiting: 0, levels: BTreeMap::new() }
    }

    /// Adds a new request. If the queue is full, returns the request as an error.
    pub(super) fn push(&mut self, request: QueuedRequest<K, T>) -> Result<(), QueuedRequest<K, T>> {
        if self.waiting >= self.max_requests {
            return Err(request);
        }
        self.level(request.level).of(request.tenant).push(request);
        self.waiting += 1;
        Ok(())
    }

    /// Returns requests to their queues, even if this exceeds the maximum number of requests.
    pub(super) fn put_back(&mut self, requests: Vec<QueuedRequest<K, T>>) {
        for request in requests {
            self.waiting += 1;
            self.level(request.level).of(request.tenant).put_back(request);
        }
    }

    /// Removes and returns the last request of another tenant, to make room for a request of `tenant`. The
    /// other tenant is the one with the most requests for its weight. Returns `None` if `tenant` itself has
    /// no fewer, or if that request does not make `enough` room.
    pub(super) fn displace(
        &mut self,
        tenant: TenantId,
        turns: &TenantTurns,
        enough: impl Fn(&T) -> bool,
    ) -> Option<QueuedRequest<K, T>> {
        let load = |tenant, more| (self.len_of(tenant) + more) as f64 / turns.weight(tenant);
        let others = self.tenants().iter().filter(|&other| other != tenant);
        let (most, other) = others.map(|other| (load(other, 0), other)).max_by(|a, b| a.0.total_cmp(&b.0))?;
        if load(tenant, 1) >= most {
            return None;
        }
        let mut queues = self.levels.values_mut().rev().filter_map(|level| level.get_mut(other));
        let queue = queues.find(|queue| !queue.is_empty())?;
        queue.last().filter(|request| enough(&request.item))?;
        let displaced = queue.take_last()?;
        self.taken(1);
        Some(displaced)
    }

    fn len_of(&self, tenant: TenantId) -> usize {
        self.levels.values().filter_map(|level| level.get(tenant)).map(RequestQueue::len).sum()
    }

    /// Returns the tenants with requests.
    pub(super) fn tenants(&self) -> TenantSet {
        let queues = self.levels.values().flat_map(TenantQueues::iter);
        queues.filter(|(_, queue)| !queue.is_empty()).map(|(tenant, _)| tenant).collect()
    }

    fn level(&mut self, level: u64) -> &mut TenantQueues<K, T> {
        self.levels.entry(level).or_default()
    }

    /// Returns the next batch, from the highest priority that has a batch ready.
    pub(super) fn next(&mut self, terms: &BatchTerms<'_>) -> NextBatch<K, T> {
        let mut soonest: Option<Timestamp> = None;
        for queues in self.levels.values_mut() {
            match queues.next(terms) {
                NextBatch::Run(taken) => {
                    self.taken(taken.batch.len() + taken.late.len());
                    return NextBatch::Run(taken);
                }
                NextBatch::WaitUntil(until) => {
                    soonest = Some(soonest.map_or(until, |other| other.min(until)))
                }
                NextBatch::Idle => {}
            }
        }
        soonest.map_or(NextBatch::Idle, NextBatch::WaitUntil)
    }

    /// Returns the earliest deadline of all requests, or `None` if there are none.
    pub(super) fn earliest_deadline(&self) -> Option<Timestamp> {
        let queues = self.levels.values().flat_map(TenantQueues::iter);
        queues.filter_map(|(_, queue)| queue.earliest_deadline()).min()
    }

    /// Removes and returns the requests that `gone` selects. Inspects every request.
    pub(super) fn take_if(
        &mut self,
        mut gone: impl FnMut(&QueuedRequest<K, T>) -> bool,
    ) -> Vec<QueuedRequest<K, T>> {
        let queues = self.levels.values_mut().flat_map(TenantQueues::queues_mut);
        let taken: Vec<_> = queues.flat_map(|queue| queue.take_if(&mut gone)).collect();
        self.taken(taken.len());
        taken
    }

    pub(super) fn drain_all(&mut self) -> Vec<QueuedRequest<K, T>> {
        self.waiting = 0;
        let mut levels = std::mem::take(&mut self.levels);
        let queues = levels.values_mut().flat_map(TenantQueues::queues_mut);
        queues.flat_map(RequestQueue::drain_all).collect()
    }

    fn taken(&mut self, requests: usize) {
        self.waiting -= requests;
        if self.levels.len() > KEPT_LEVELS {
            self.levels.retain(|_, queue| !queue.is_empty());
        }
    }

    /// Returns true if there are more requests than the limit permits.
    pub(super) fn is_over_limit(&self) -> bool {
        self.waiting > self.max_requests
    }

    pub(super) fn len(&self) -> usize {
        self.waiting
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting == 0
    }

    /// Returns the number of rows of all requests.
    pub(super) fn rows(&self) -> u64 {
        self.levels.values().map(TenantQueues::rows).sum()
    }

    /// Returns the maximum number of rows that run before a new request of this level and tenant.
    pub(super) fn rows_before(&self, level: u64, tenant: TenantId, turns: &TenantTurns) -> u64 {
        let earlier: u64 = self.levels.range(..level).map(|(_, queues)| queues.rows()).sum();
        earlier + self.levels.get(&level).map_or(0, |queues| queues.rows_before(tenant, turns))
    }
}
