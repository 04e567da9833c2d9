//! The waiting requests: for each priority a queue by deadline; the highest priority goes first.

use std::collections::BTreeMap;

use shadowslice_shared::units::Timestamp;

use super::batcher::{self, Limits, Next};
use super::punctual::Punctual;
use super::queue::{Entry, Queue};

/// So many priorities keep their queues when these are empty: more requests of them will come.
const KEPT: usize = 8;

/// A batch holds requests of one priority.
#[derive(Debug)]
pub(super) struct Queues<K, T> {
    most: usize,
    waiting: usize,
    /// Few of the queues are empty, so there are not many more of them than requests.
    levels: BTreeMap<u64, Queue<K, T>>,
}

impl<K: Ord + Clone, T> Queues<K, T> {
    pub(super) fn new(most: usize) -> Self {
        Self { most, waiting: 0, levels: BTreeMap::new() }
    }

    /// Gives the request back when no more may wait.
    pub(super) fn push(&mut self, request: Entry<K, T>) -> Result<(), Entry<K, T>> {
        if self.waiting >= self.most {
            return Err(request);
        }
        self.level(request.level).push(request);
        self.waiting += 1;
        Ok(())
    }

    /// Past the bound if need be.
    pub(super) fn put_back(&mut self, requests: Vec<Entry<K, T>>) {
        for request in requests {
            self.waiting += 1;
            self.level(request.level).put_back(request);
        }
    }

    fn level(&mut self, level: u64) -> &mut Queue<K, T> {
        self.levels.entry(level).or_default()
    }

    /// From the first priority that has something ready.
    pub(super) fn next(
        &mut self,
        limits: &Limits,
        punctual: Option<&Punctual<'_>>,
        now: Timestamp,
    ) -> Next<K, T> {
        let mut soonest: Option<Timestamp> = None;
        for queue in self.levels.values_mut() {
            match batcher::next(queue, limits, punctual, now) {
                Next::Run(taken) => {
                    self.taken(taken.batch.len() + taken.late.len());
                    return Next::Run(taken);
                }
                Next::WaitUntil(until) => soonest = Some(soonest.map_or(until, |other| other.min(until))),
                Next::Idle => {}
            }
        }
        soonest.map_or(Next::Idle, Next::WaitUntil)
    }

    /// Looks at every request.
    pub(super) fn take_if(&mut self, mut gone: impl FnMut(&Entry<K, T>) -> bool) -> Vec<Entry<K, T>> {
        let taken: Vec<_> = self.levels.values_mut().flat_map(|queue| queue.take_if(&mut gone)).collect();
        self.taken(taken.len());
        taken
    }

    pub(super) fn drain_all(&mut self) -> Vec<Entry<K, T>> {
        self.waiting = 0;
        let levels = std::mem::take(&mut self.levels);
        levels.into_values().flat_map(|mut queue| queue.drain_all()).collect()
    }

    fn taken(&mut self, requests: usize) {
        self.waiting -= requests;
        if self.levels.len() > KEPT {
            self.levels.retain(|_, queue| !queue.is_empty());
        }
    }

    pub(super) fn len(&self) -> usize {
        self.waiting
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting == 0
    }

    /// At most these rows go before a new request.
    pub(super) fn rows_before(&self, level: u64) -> u64 {
        self.levels.range(..=level).map(|(_, queue)| queue.rows()).sum()
    }
}
