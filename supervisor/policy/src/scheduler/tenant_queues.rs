//! The queued requests of one priority level, with a queue for each tenant.
//!
//! If several tenants wait, the tenant with the least virtual time starts the batch. All tenants fill it:
//! each further request comes from the tenant whose virtual time is then the least. Every request adds its
//! predicted SM time.

use std::collections::BTreeMap;

use shadowslice_shared::units::Timestamp;

use super::batcher::{self, BatchLimits, FormedBatch, NextBatch};
use super::deadline::{DeadlineFilter, Selection};
use super::queue::{QueueKey, QueuedRequest, RequestQueue};
use crate::tenants::{TenantId, TenantTurns};

/// The limits and turns for the batches of one model.
#[derive(Debug, Clone, Copy)]
pub(super) struct BatchTerms<'t> {
    pub(super) limits: &'t BatchLimits,
    pub(super) deadline_filter: Option<&'t DeadlineFilter<'t>>,
    /// The turns of the tenants, which include the requests in flight.
    pub(super) turns: &'t TenantTurns,
    /// The predicted SM time of one row in SM·s.
    pub(super) row_cost: f64,
    pub(super) now: Timestamp,
}

/// The position of a request among the queues of a level. Positions have the order of the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct TenantPlace {
    key: QueueKey,
    tenant: TenantId,
}

#[derive(Debug)]
pub(super) struct TenantQueues<K, T>(BTreeMap<TenantId, RequestQueue<K, T>>);

// A derived implementation would require `K` and `T` to implement `Default`.
impl<K, T> Default for TenantQueues<K, T> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<K: Ord + Clone, T> TenantQueues<K, T> {
    pub(super) fn of(&mut self, tenant: TenantId) -> &mut RequestQueue<K, T> {
        self.0.entry(tenant).or_default()
    }

    pub(super) fn get(&self, tenant: TenantId) -> Option<&RequestQueue<K, T>> {
        self.0.get(&tenant)
    }

    pub(super) fn get_mut(&mut self, tenant: TenantId) -> Option<&mut RequestQueue<K, T>> {
        self.0.get_mut(&tenant)
    }

    /// Returns the queues of the tenants, in the order of the tenants' ids.
    pub(super) fn iter(&self) -> impl Iterator<Item = (TenantId, &RequestQueue<K, T>)> {
        self.0.iter().map(|(&tenant, queue)| (tenant, queue))
    }

    pub(super) fn queues_mut(&mut self) -> impl Iterator<Item = &mut RequestQueue<K, T>> {
        self.0.values_mut()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.values().all(RequestQueue::is_empty)
    }

    pub(super) fn rows(&self) -> u64 {
        self.0.values().map(RequestQueue::rows).sum()
    }

    /// Returns the rows that run before a new request of a tenant. For each of its own rows, other tenants
    /// run as many rows as their weights allow.
    pub(super) fn rows_before(&self, tenant: TenantId, turns: &TenantTurns) -> u64 {
        let own = self.0.get(&tenant).map_or(0, RequestQueue::rows);
        let others = self.iter().filter(|&(other, _)| other != tenant);
        let first = others.map(|(other, queue)| {
            let turn = (own + 1) as f64 * turns.weight(other) / turns.weight(tenant);
            queue.rows().min(turn.ceil() as u64)
        });
        own + first.sum::<u64>()
    }

    /// Returns the next batch.
    pub(super) fn next(&mut self, terms: &BatchTerms<'_>) -> NextBatch<K, T> {
        let &BatchTerms { limits, deadline_filter, turns, now, .. } = terms;
        let is_only = self.0.len() == 1;
        if let Some(mut only) = self.0.first_entry().filter(|_| is_only && turns.held.is_empty()) {
            return batcher::next(only.get_mut(), limits, deadline_filter, now);
        }
        let waiting = self.iter().filter(|(_, queue)| !queue.is_empty()).map(|(tenant, _)| tenant);
        let (held, mut waiting): (Vec<_>, Vec<_>) = waiting.partition(|&tenant| turns.held.contains(tenant));
        waiting.sort_by(|&one, &other| turns.used(one).total_cmp(&turns.used(other)));
        let mut soonest = (!held.is_empty()).then(|| now + turns.held_for);
        for &lead in &waiting {
            let fills = limits.max_rows > 0 && waiting.len() > 1;
            let next = match self.shape_at_head(lead).filter(|_| fills) {
                Some(shape) if self.is_ready(lead, &waiting, &shape, terms) => {
                    NextBatch::Run(self.fill(&waiting, &shape, terms))
                }
                _ => batcher::next(self.of(lead), limits, deadline_filter, now),
            };
            match next {
                NextBatch::Run(batch) => return NextBatch::Run(batch),
                NextBatch::WaitUntil(until) => {
                    soonest = Some(soonest.map_or(until, |other| other.min(until)));
                }
                NextBatch::Idle => {}
            }
        }
        soonest.map_or(NextBatch::Idle, NextBatch::WaitUntil)
    }

    /// Returns the shape of the first request of a tenant, or `None` if the request must run alone.
    fn shape_at_head(&self, tenant: TenantId) -> Option<K> {
        let queue = self.get(tenant)?;
        let head = queue.at(queue.head()?);
        (!head.alone).then(|| head.shape.clone())
    }

    /// Returns true if a batch that starts with the first request of `lead` does not wait for further
    /// requests.
    fn is_ready(&self, lead: TenantId, tenants: &[TenantId], shape: &K, terms: &BatchTerms<'_>) -> bool {
        let limits = terms.limits;
        let sizes = tenants.iter().filter_map(|&tenant| Some(self.get(tenant)?.size_of(shape)));
        let (rows, requests) = sizes.fold((0, 0), |sum, size| (sum.0 + size.0, sum.1 + size.1));
        let waits =
            |queue: &RequestQueue<K, T>| batcher::waits_until(queue, queue.head()?, limits, terms.now);
        rows >= u64::from(limits.max_rows)
            || requests >= limits.max_requests
            || self.get(lead).and_then(waits).is_none()
    }

    /// Forms a batch of one shape from the requests of several tenants.
    fn fill(&mut self, tenants: &[TenantId], shape: &K, terms: &BatchTerms<'_>) -> FormedBatch<K, T> {
        let mut late = Vec::new();
        loop {
            let mut places = self.fair_places(tenants, shape, terms);
            places.sort_unstable();
            let selection = match terms.deadline_filter {
                Some(filter) => {
                    let due: Vec<_> =
                        places.iter().map(|place| filter.due_request(self.at(*place))).collect();
                    filter.select(&due, terms.limits)
                }
                None => Selection { late: 0, count: places.len() },
            };
            let mut take = |places: &[TenantPlace]| -> Vec<QueuedRequest<K, T>> {
                places.iter().map(|place| self.of(place.tenant).take(place.key)).collect()
            };
            let (refused, rest) = places.split_at(selection.late);
            late.extend(take(refused));
            // Refused requests leave room for others.
            if refused.is_empty() || places.is_empty() {
                return FormedBatch { batch: take(&rest[..selection.count]), late };
            }
        }
    }

    fn at(&self, place: TenantPlace) -> &QueuedRequest<K, T> {
        self.0[&place.tenant].at(place.key)
    }

    /// Returns the requests that fit into a batch, at least one if any has this shape. Each comes from the
    /// tenant with the least virtual time.
    fn fair_places(&self, tenants: &[TenantId], shape: &K, terms: &BatchTerms<'_>) -> Vec<TenantPlace> {
        let of = |&tenant: &TenantId| Some((tenant, self.get(tenant)?.places_of(shape).peekable()));
        let mut queues: Vec<_> = tenants.iter().filter_map(of).collect();
        let (mut turns, mut rows, mut places) = (terms.turns.clone(), 0_u32, Vec::new());
        while places.len() < terms.limits.max_requests {
            let nonempty =
                queues.iter_mut().filter_map(|(tenant, keys)| Some((*tenant, *keys.peek()?, keys)));
            let least = nonempty.min_by(|one, other| turns.used(one.0).total_cmp(&turns.used(other.0)));
            let Some((tenant, key, keys)) = least else { break };
            let place = TenantPlace { key, tenant };
            let request = self.at(place);
            rows = rows.saturating_add(request.rows);
            if rows > terms.limits.max_rows && !places.is_empty() {
                break;
            }
            turns.add(tenant, f64::from(request.rows) * terms.row_cost);
            keys.next();
            places.push(place);
        }
        places
    }
}
