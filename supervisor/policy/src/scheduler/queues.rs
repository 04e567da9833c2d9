//! The queued requests of a model. Each priority has a queue, ordered by deadline. Requests with the
//! highest priority run first.

use std::collections::BTreeMap;

use shadowslice_shared::units::Timestamp;

use super::batcher::{self, BatchLimits, NextBatch};
use super::deadline::DeadlineFilter;
use super::queue::{QueuedRequest, RequestQueue};

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
    levels: BTreeMap<u64, RequestQueue<K, T>>,
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
        self.level(request.level).push(request);
        self.waiting += 1;
        Ok(())
    }

    /// Returns requests to their queues, even if this exceeds the maximum number of requests.
    pub(super) fn put_back(&mut self, requests: Vec<QueuedRequest<K, T>>) {
        for request in requests {
            self.waiting += 1;
            self.level(request.level).put_back(request);
        }
    }

    fn level(&mut self, level: u64) -> &mut RequestQueue<K, T> {
        self.levels.entry(level).or_default()
    }

    /// Returns the next batch, from the highest priority that has a batch ready.
    pub(super) fn next(
        &mut self,
        limits: &BatchLimits,
        deadline_filter: Option<&DeadlineFilter<'_>>,
        now: Timestamp,
    ) -> NextBatch<K, T> {
        let mut soonest: Option<Timestamp> = None;
        for queue in self.levels.values_mut() {
            match batcher::next(queue, limits, deadline_filter, now) {
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
        self.levels.values().filter_map(RequestQueue::earliest_deadline).min()
    }

    /// Removes and returns the requests that `gone` selects. Inspects every request.
    pub(super) fn take_if(
        &mut self,
        mut gone: impl FnMut(&QueuedRequest<K, T>) -> bool,
    ) -> Vec<QueuedRequest<K, T>> {
        let taken: Vec<_> = self.levels.values_mut().flat_map(|queue| queue.take_if(&mut gone)).collect();
        self.taken(taken.len());
        taken
    }

    pub(super) fn drain_all(&mut self) -> Vec<QueuedRequest<K, T>> {
        self.waiting = 0;
        let levels = std::mem::take(&mut self.levels);
        levels.into_values().flat_map(|mut queue| queue.drain_all()).collect()
    }

    fn taken(&mut self, requests: usize) {
        self.waiting -= requests;
        if self.levels.len() > KEPT_LEVELS {
            self.levels.retain(|_, queue| !queue.is_empty());
        }
    }

    pub(super) fn len(&self) -> usize {
        self.waiting
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting == 0
    }

    /// Returns the number of rows of all requests.
    pub(super) fn rows(&self) -> u64 {
        self.levels.values().map(RequestQueue::rows).sum()
    }

    /// Returns the maximum number of rows that run before a new request of this level.
    pub(super) fn rows_before(&self, level: u64) -> u64 {
        self.levels.range(..=level).map(|(_, queue)| queue.rows()).sum()
    }
}
