//! A queue of one model's requests of one priority, ordered by deadline.
//!
//! Some requests return to the queue because their worker died or drained too slowly. These requests
//! run before the others of this priority, because they have already waited once.
//!
//! An operation on one request takes O(log n) time. Only [`RequestQueue::take_if`] inspects all
//! requests.

use std::collections::{BTreeMap, BTreeSet};

use shadowslice_shared::units::Timestamp;

use crate::tenants::TenantId;

/// A request in the queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueuedRequest<K, T> {
    /// The shape of the inputs. All requests of a batch have the same shape.
    pub shape: K,
    /// The number of rows in the request, at least 1.
    pub rows: u32,
    /// The time at which the first byte of the request arrived.
    pub arrived: Timestamp,
    /// The time by which the client must have the answer.
    pub deadline: Timestamp,
    /// The time from which the client no longer waits for the answer, or `None` if it set no timeout.
    pub expires: Option<Timestamp>,
    /// The priority level. Requests with lower levels run first. Levels that clients can choose start
    /// at 1.
    pub level: u64,
    /// The tenant whose SM time the request uses.
    pub tenant: TenantId,
    /// True if the request must run in a batch without other requests.
    pub alone: bool,
    /// The driver's handle for the request.
    pub item: T,
}

/// The level of a request that is retried because its worker died while it executed the request.
pub const SUSPECT_LEVEL: u64 = 0;

/// The position of a request in the queue. The request with the smallest key is at the head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct QueueKey {
    /// True for a new request. This is false for a request that was put back, which runs before new
    /// requests.
    fresh: bool,
    deadline: Timestamp,
    /// A number that makes keys unique. Among equal deadlines, it preserves the order of arrival.
    sequence: u64,
}

/// The requests of one shape that are allowed to share a batch. A group is never empty.
#[derive(Debug, Default)]
struct Group {
    places: BTreeSet<QueueKey>,
    rows: u64,
}

/// A queue of requests, ordered by deadline.
#[derive(Debug)]
pub struct RequestQueue<K, T> {
    sequence: u64,
    rows: u64,
    entries: BTreeMap<QueueKey, QueuedRequest<K, T>>,
    /// The positions of the requests that may share a batch, by shape.
    groups: BTreeMap<K, Group>,
    /// The positions of the requests that must run alone.
    alone: BTreeSet<QueueKey>,
}

// A derived implementation would require `K` and `T` to implement `Default`.
impl<K, T> Default for RequestQueue<K, T> {
    fn default() -> Self {
        let (entries, groups, alone) = (BTreeMap::new(), BTreeMap::new(), BTreeSet::new());
        Self { sequence: 0, rows: 0, entries, groups, alone }
    }
}

impl<K: Ord + Clone, T> RequestQueue<K, T> {
    /// Adds a new request.
    pub fn push(&mut self, entry: QueuedRequest<K, T>) {
        self.insert(entry, true);
    }

    /// Returns a request to the queue, before all requests that were added with `push`. Requests that
    /// were put back are ordered by deadline, and then by the order of these calls.
    pub fn put_back(&mut self, entry: QueuedRequest<K, T>) {
        self.insert(entry, false);
    }

    /// Returns the total number of rows of all requests in the queue.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Returns the number of requests in the queue.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns the last request in queue order.
    pub fn last(&self) -> Option<&QueuedRequest<K, T>> {
        self.entries.values().next_back()
    }

    /// Removes and returns the last request in queue order.
    pub fn take_last(&mut self) -> Option<QueuedRequest<K, T>> {
        let last = self.entries.keys().next_back().copied()?;
        Some(self.take(last))
    }

    /// Returns true if the queue is empty.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the earliest deadline of all requests, or `None` if there are none.
    pub fn earliest_deadline(&self) -> Option<Timestamp> {
        let first_fresh = QueueKey { fresh: true, deadline: Timestamp::default(), sequence: 0 };
        let put_back = self.entries.range(..first_fresh).next();
        let fresh = self.entries.range(first_fresh..).next();
        [put_back, fresh].into_iter().flatten().map(|(place, _)| place.deadline).min()
    }

    /// Removes and returns all requests in queue order.
    pub fn drain_all(&mut self) -> Vec<QueuedRequest<K, T>> {
        self.groups.clear();
        self.alone.clear();
        self.rows = 0;
        std::mem::take(&mut self.entries).into_values().collect()
    }

    /// Removes and returns the requests that `gone` selects, in queue order. Inspects every request.
    pub fn take_if(
        &mut self,
        mut gone: impl FnMut(&QueuedRequest<K, T>) -> bool,
    ) -> Vec<QueuedRequest<K, T>> {
        let places: Vec<QueueKey> =
            self.entries.iter().filter(|(_, entry)| gone(entry)).map(|(&place, _)| place).collect();
        places.into_iter().map(|place| self.take(place)).collect()
    }

    fn insert(&mut self, entry: QueuedRequest<K, T>, fresh: bool) {
        let place = QueueKey { fresh, deadline: entry.deadline, sequence: self.sequence };
        self.sequence += 1;
        self.rows += u64::from(entry.rows);
        if entry.alone {
            self.alone.insert(place);
        } else {
            // A lookup before the insertion avoids a clone of known shapes.
            if !self.groups.contains_key(&entry.shape) {
                self.groups.insert(entry.shape.clone(), Group::default());
            }
            let group = self.groups.get_mut(&entry.shape).expect("inserted if it was missing");
            group.places.insert(place);
            group.rows += u64::from(entry.rows);
        }
        self.entries.insert(place, entry);
    }

    /// Removes the request at `place`, which must exist.
    pub(crate) fn take(&mut self, place: QueueKey) -> QueuedRequest<K, T> {
        let entry = self.entries.remove(&place).expect("places come from this queue");
        self.rows -= u64::from(entry.rows);
        if entry.alone {
            self.alone.remove(&place);
            return entry;
        }
        let group = self.groups.get_mut(&entry.shape).expect("every shape that waits has its group");
        group.places.remove(&place);
        group.rows -= u64::from(entry.rows);
        if group.places.is_empty() {
            self.groups.remove(&entry.shape);
        }
        entry
    }

    /// Returns the request at `place`, which must exist.
    pub(crate) fn at(&self, place: QueueKey) -> &QueuedRequest<K, T> {
        &self.entries[&place]
    }

    pub(crate) fn head(&self) -> Option<QueueKey> {
        self.entries.keys().next().copied()
    }

    /// Returns the first position of each shape, and the first position of a request that must run
    /// alone.
    pub(crate) fn starts(&self) -> impl Iterator<Item = QueueKey> {
        let grouped = self.groups.values().filter_map(|group| group.places.first());
        grouped.chain(self.alone.first()).copied()
    }

    pub(crate) fn first_of(&self, shape: &K) -> Option<QueueKey> {
        self.groups.get(shape)?.places.first().copied()
    }

    pub(crate) fn size_of(&self, shape: &K) -> (u64, usize) {
        self.groups.get(shape).map_or((0, 0), |group| (group.rows, group.places.len()))
    }

    /// Returns the requests of one shape that may share a batch, in queue order.
    pub(crate) fn members(&self, shape: &K) -> impl Iterator<Item = &QueuedRequest<K, T>> {
        self.places_of(shape).map(|place| self.at(place))
    }

    /// Returns the positions of the requests of one shape that may share a batch, in queue order.
    pub(crate) fn places_of(&self, shape: &K) -> impl Iterator<Item = QueueKey> {
        self.groups.get(shape).into_iter().flat_map(|group| &group.places).copied()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn ms(ms: u64) -> Timestamp {
        Timestamp::after_origin(Duration::from_millis(ms))
    }

    fn entry(item: u32, deadline: u64) -> QueuedRequest<&'static str, u32> {
        QueuedRequest {
            shape: "a",
            rows: 1,
            arrived: ms(0),
            deadline: ms(deadline),
            expires: None,
            level: 0,
            tenant: TenantId::DEFAULT,
            alone: false,
            item,
        }
    }

    fn items(entries: Vec<QueuedRequest<&'static str, u32>>) -> Vec<u32> {
        entries.into_iter().map(|entry| entry.item).collect()
    }

    #[test]
    fn the_earliest_deadline_first_and_equal_ones_as_they_came() {
        let mut queue = RequestQueue::default();
        for (item, deadline) in [(1, 30), (2, 10), (3, 30), (4, 20)] {
            queue.push(entry(item, deadline));
        }
        assert_eq!(items(queue.drain_all()), [2, 4, 1, 3]);
        assert!(queue.is_empty());
    }

    #[test]
    fn requests_that_are_put_back_go_first() {
        let mut queue = RequestQueue::default();
        queue.push(entry(1, 1));
        queue.push(entry(2, 2));
        queue.put_back(entry(8, 90));
        queue.put_back(entry(9, 90));
        assert_eq!(items(queue.drain_all()), [8, 9, 1, 2]);
    }

    #[test]
    fn requests_whose_clients_went_away_are_taken_out() {
        let mut queue = RequestQueue::default();
        for item in 0..6 {
            let mut entry = entry(item, u64::from(item));
            entry.alone = item % 3 == 0;
            queue.push(entry);
        }
        assert_eq!(items(queue.take_if(|entry| entry.item % 2 == 0)), [0, 2, 4]);
        assert_eq!((queue.size_of(&"a"), queue.rows()), ((2, 2), 3));
        assert_eq!(items(queue.drain_all()), [1, 3, 5]);
        assert_eq!(queue.rows(), 0);
    }
}
