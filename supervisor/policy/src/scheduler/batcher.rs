//! When a batch runs, and which requests are in it.

use std::time::Duration;

use shadowslice_shared::units::Timestamp;

use super::punctual::{Pick, Punctual};
use super::queue::{Entry, Queue, QueueKey};
use crate::latency::Predictor;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Zero: the model has no batch axis, every request runs by itself.
    pub max_rows: u32,
    pub max_requests: usize,
    /// How long a batch that is not full waits for more, counted from its oldest arrival.
    pub max_delay: Duration,
}

#[derive(Debug, PartialEq, Eq)]
pub enum Next<K, T> {
    Run(Taken<K, T>),
    /// Every batch still waits for company; ask again then, or when something arrives.
    WaitUntil(Timestamp),
    Idle,
}

#[derive(Debug, PartialEq, Eq)]
pub struct Taken<K, T> {
    /// None if all are too late.
    pub batch: Vec<Entry<K, T>>,
    /// Refused, because they cannot be answered in time any more.
    pub late: Vec<Entry<K, T>>,
}

/// Decides what runs next, when the lane has a free slot.
///
/// The batch starts with the head of the queue and is joined by others of its shape, in their
/// order, up to the first that does not fit. When the head's batch may still wait for company, the
/// first other one that is ready takes the slot: waiting exists to use an idle slot better, not to
/// keep it idle. That costs the head at most the execution of one batch: once its own wait is over
/// it goes first.
///
/// Late requests are refused only if there is a `punctual`, which knows the lane of the batch.
pub fn next<K: Ord + Clone, T>(
    queue: &mut Queue<K, T>,
    limits: &Limits,
    punctual: Option<&Punctual<'_>>,
    now: Timestamp,
) -> Next<K, T> {
    let Some(head) = queue.head() else {
        return Next::Idle;
    };
    let Some(mut soonest) = waits_until(queue, head, limits, now) else {
        return Next::Run(take_batch(queue, head, limits, punctual));
    };
    let mut ready: Option<QueueKey> = None;
    for start in queue.starts().filter(|&start| start != head) {
        match waits_until(queue, start, limits, now) {
            Some(until) => soonest = soonest.min(until),
            None => ready = Some(ready.map_or(start, |other| other.min(start))),
        }
    }
    match ready {
        Some(start) => Next::Run(take_batch(queue, start, limits, punctual)),
        None => Next::WaitUntil(soonest),
    }
}

/// How many rows go first. A batch that would be padded is parted where both parts, one after the
/// other, take no longer than the whole: the first part is answered sooner, no request later, and
/// requests that arrive meanwhile join the second part.
pub fn first_part(rows: u32, predictor: &Predictor) -> u32 {
    let times = |first: u32| {
        let parts = predictor.predict(first)?.saturating_add(predictor.predict(rows - first)?);
        Some((parts, predictor.predict(rows)?))
    };
    let worth_it = |first: &u32| times(*first).is_some_and(|(parts, whole)| parts <= whole);
    predictor.unpadded_below(rows).filter(worth_it).unwrap_or(rows)
}

/// Until when the batch that starts there waits for company; `None` when it is ready.
fn waits_until<K: Ord + Clone, T>(
    queue: &Queue<K, T>,
    start: QueueKey,
    limits: &Limits,
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
    // Here all of them fit into one batch, so this looks at no more than one batch.
    let closes =
        queue.members(&first.shape).map(|entry| entry.deadline.min(entry.arrived + limits.max_delay));
    closes.min().filter(|&moment| moment > now)
}

fn take_batch<K: Ord + Clone, T>(
    queue: &mut Queue<K, T>,
    start: QueueKey,
    limits: &Limits,
    punctual: Option<&Punctual<'_>>,
) -> Taken<K, T> {
    let first = queue.at(start);
    if first.alone || limits.max_rows == 0 {
        let late = punctual.is_some_and(|punctual| punctual.pick(&[punctual.due(first)], limits).go == 0);
        let entry = vec![queue.take(start)];
        return if late {
            Taken { batch: Vec::new(), late: entry }
        } else {
            Taken { batch: entry, late: Vec::new() }
        };
    }
    let shape = first.shape.clone();
    let Pick { late, go } = match punctual {
        Some(punctual) => punctual.pick(&punctual.dues(queue.members(&shape), limits), limits),
        None => Pick { late: 0, go: joining(queue.members(&shape), limits) },
    };
    let mut take = |count: usize| -> Vec<Entry<K, T>> {
        (0..count).map_while(|_| queue.first_of(&shape).map(|place| queue.take(place))).collect()
    };
    let late = take(late);
    Taken { batch: take(go), late }
}

/// At least one.
fn joining<'e, K: 'e, T: 'e>(waiting: impl Iterator<Item = &'e Entry<K, T>>, limits: &Limits) -> usize {
    let mut rows = 0_u32;
    let fits = |entry: &&Entry<K, T>| {
        rows = rows.saturating_add(entry.rows);
        rows <= limits.max_rows
    };
    waiting.take(limits.max_requests).take_while(fits).count().max(1)
}

#[cfg(test)]
#[path = "batcher_tests.rs"]
mod tests;
