//! Batching: when a batch runs, and which requests it contains.

use std::time::Duration;

use shadowslice_shared::units::Timestamp;

use super::deadline::{DeadlineFilter, Selection};
use super::queue::{QueueKey, QueuedRequest, RequestQueue};
use crate::latency::Predictor;

/// The limits of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchLimits {
    /// The most rows; 0 if the model has no batch axis, so that every request runs by itself.
    pub max_rows: u32,
    /// The most requests.
    pub max_requests: usize,
    /// The longest time that a batch waits for further requests, from the arrival of its oldest request.
    pub max_delay: Duration,
}

/// The answer to whether a batch can run now.
#[derive(Debug, PartialEq, Eq)]
pub enum NextBatch<K, T> {
    /// This batch runs now.
    Run(FormedBatch<K, T>),
    /// All batches still wait for further requests until this time.
    WaitUntil(Timestamp),
    /// The queue is empty.
    Idle,
}

/// The requests that leave the queue together.
#[derive(Debug, PartialEq, Eq)]
pub struct FormedBatch<K, T> {
    /// The batch; empty if all requests are too late.
    pub batch: Vec<QueuedRequest<K, T>>,
    /// The refused requests, which cannot be answered in time any more.
    pub late: Vec<QueuedRequest<K, T>>,
}

/// Decides what runs next on a lane with a free slot.
///
/// A batch starts with the head of the queue. Other requests of its shape join in their order, up to
/// the first one that does not fit. If the head's batch may still wait for further requests, the first
/// other batch that is ready takes the slot: waiting should fill a slot better and not leave it idle.
/// The head loses the execution of at most one batch, because it goes first once its wait is over.
///
/// Only a `deadline_filter`, which knows the lane of the batch, refuses late requests.
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

/// Returns how many rows of a batch are sent first. A batch that needs padding is split if its two
/// parts, one after the other, take no longer than the whole. The first part is then answered sooner,
/// no request is answered later, and requests that arrive meanwhile join the second part.
pub fn rows_sent_first(rows: u32, predictor: &Predictor) -> u32 {
    let times = |first: u32| {
        let parts = predictor.predict(first)?.saturating_add(predictor.predict(rows - first)?);
        Some((parts, predictor.predict(rows)?))
    };
    let worth_it = |first: &u32| times(*first).is_some_and(|(parts, whole)| parts <= whole);
    predictor.unpadded_below(rows).filter(worth_it).unwrap_or(rows)
}

/// Returns the time until which the batch that starts there waits for further requests, or `None` if it
/// is ready.
fn waits_until<K: Ord + Clone, T>(
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
    // All of these requests fit into one batch, so this scan is short.
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

/// Returns how many of the waiting requests fit into one batch; at least one.
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
