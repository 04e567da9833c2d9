//! The batcher, which decides when a batch runs and which requests the batch contains.

use std::time::Duration;

use shadowslice_shared::units::Timestamp;

use super::deadline::{DeadlineFilter, Selection};
use super::queue::{QueueKey, QueuedRequest, RequestQueue};
use crate::latency::Predictor;

/// The limits on a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchLimits {
    /// The maximum number of rows. It is 0 if the model has no batch axis. In this case, every request
    /// runs alone.
    pub max_rows: u32,
    /// The maximum number of requests.
    pub max_requests: usize,
    /// The maximum time for which a batch waits for further requests, counted from the arrival of its
    /// oldest request.
    pub max_delay: Duration,
}

/// The next step of a lane with a free slot.
#[derive(Debug, PartialEq, Eq)]
pub enum NextBatch<K, T> {
    /// The lane runs this batch now.
    Run(FormedBatch<K, T>),
    /// All batches wait for further requests. The first batch is due at this time.
    WaitUntil(Timestamp),
    /// The queue is empty.
    Idle,
}

/// The requests that leave the queue together, either in a batch or as refusals.
#[derive(Debug, PartialEq, Eq)]
pub struct FormedBatch<K, T> {
    /// The requests of the batch. The list is empty if all requests are late.
    pub batch: Vec<QueuedRequest<K, T>>,
    /// The refused requests, which can no longer be answered in time.
    pub late: Vec<QueuedRequest<K, T>>,
}

/// Decides which batch runs next on a lane with a free slot.
///
/// A batch starts with the request at the head of the queue. Other requests of the same shape join it
/// in queue order, up to the first one that does not fit. If this batch can still wait for further
/// requests, another batch that is ready takes the slot, so that the slot does not stay idle. The
/// request at the head is delayed by at most one batch, because it runs first after its wait.
///
/// Late requests are refused only if there is a `deadline_filter`, which knows the state of the lane.
pub fn next<K: Ord + Clone, T>(
    queue: &mut RequestQueue<K, T>,
    limits: &BatchLimits,
    deadline_filter: Option<&DeadlineFilter<'_>>,
    now: Timestamp,
) -> NextBatch<K, T> {
    let Some(head) = queue.head() else {
        return NextBatch::Idle;
    };
    let Some(mut soonest) = waits_until(queue, head, limits, now) else {
        return NextBatch::Run(take_batch(queue, head, limits, deadline_filter));
    };
    let mut ready: Option<QueueKey> = None;
    for start in queue.starts().filter(|&start| start != head) {
        match waits_until(queue, start, limits, now) {
            Some(until) => soonest = soonest.min(until),
            None => ready = Some(ready.map_or(start, |other| other.min(start))),
        }
    }
    match ready {
        Some(start) => NextBatch::Run(take_batch(queue, start, limits, deadline_filter)),
        None => NextBatch::WaitUntil(soonest),
    }
}

/// Returns the number of rows in the first part of a batch of `rows` rows. A batch that needs padding
/// is split in two if its parts together take no longer than the whole batch. The first part is then
/// answered earlier, and no request is answered later. Requests that arrive in the meantime can join
/// the second part.
pub fn rows_sent_first(rows: u32, predictor: &Predictor) -> u32 {
    let times = |first: u32| {
        let parts = predictor.predict(first)?.saturating_add(predictor.predict(rows - first)?);
        Some((parts, predictor.predict(rows)?))
    };
    let worth_it = |first: &u32| times(*first).is_some_and(|(parts, whole)| parts <= whole);
    predictor.unpadded_below(rows).filter(worth_it).unwrap_or(rows)
}

/// Returns the time until which the batch that starts at `start` waits for further requests. Returns
/// `None` if the batch is ready.
pub(super) fn waits_until<K: Ord + Clone, T>(
    queue: &RequestQueue<K, T>,
    start: QueueKey,
    limits: &BatchLimits,
    now: Timestamp,
) -> Option<Timestamp> {
    let first = queue.at(start);
    if first.alone || limits.max_rows == 0 || limits.max_delay.is_zero() {
        return None;
    }
    let (rows, requests) = queue.size_of(&first.shape);
    if rows >= u64::from(limits.max_rows) || requests >= limits.max_requests {
        return None;
    }
    // This scan is short, because all of these requests fit into one batch.
    let closes =
        queue.members(&first.shape).map(|entry| entry.deadline.min(entry.arrived + limits.max_delay));
    closes.min().filter(|&moment| moment > now)
}

fn take_batch<K: Ord + Clone, T>(
    queue: &mut RequestQueue<K, T>,
    start: QueueKey,
    limits: &BatchLimits,
    deadline_filter: Option<&DeadlineFilter<'_>>,
) -> FormedBatch<K, T> {
    let first = queue.at(start);
    if first.alone || limits.max_rows == 0 {
        let late = deadline_filter
            .is_some_and(|filter| filter.select(&[filter.due_request(first)], limits).count == 0);
        let entry = vec![queue.take(start)];
        return if late {
            FormedBatch { batch: Vec::new(), late: entry }
        } else {
            FormedBatch { batch: entry, late: Vec::new() }
        };
    }
    let shape = first.shape.clone();
    let Selection { late, count } = match deadline_filter {
        Some(filter) => filter.select(&filter.due_requests(queue.members(&shape), limits), limits),
        None => Selection { late: 0, count: joining(queue.members(&shape), limits) },
    };
    let mut take = |count: usize| -> Vec<QueuedRequest<K, T>> {
        (0..count).map_while(|_| queue.first_of(&shape).map(|place| queue.take(place))).collect()
    };
    let late = take(late);
    FormedBatch { batch: take(count), late }
}

/// Returns the number of waiting requests that fit into one batch, at least one.
fn joining<'e, K: 'e, T: 'e>(
    waiting: impl Iterator<Item = &'e QueuedRequest<K, T>>,
    limits: &BatchLimits,
) -> usize {
    let mut rows = 0_u32;
    let fits = |entry: &&QueuedRequest<K, T>| {
        rows = rows.saturating_add(entry.rows);
        rows <= limits.max_rows
    };
    waiting.take(limits.max_requests).take_while(fits).count().max(1)
}

#[cfg(test)]
#[path = "batcher_tests.rs"]
mod tests;
