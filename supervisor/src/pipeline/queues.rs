//! The requests that wait, by priority: a queue by deadline for each, of which the first goes first.

use std::collections::BTreeMap;

use shadowslice_policy::batcher::{self, Limits, Next};
use shadowslice_policy::punctual::Punctual;
use shadowslice_policy::queue::Queue;
use shadowslice_shared::units::Moment;

use super::lane::{Shapes, Ticket, Waiting};

/// All that waits for one model. A batch holds requests of one priority.
#[derive(Debug)]
pub(crate) struct Queues {
    most: usize,
    waiting: usize,
    /// Without empty ones, so that there are never more than requests.
    levels: BTreeMap<u64, Queue<Shapes, Ticket>>,
}

impl Queues {
    /// Of at most `most` requests.
    pub(crate) fn new(most: usize) -> Self {
        Self { most, waiting: 0, levels: BTreeMap::new() }
    }

    /// Accepts a request, or gives it back when as many wait as may.
    pub(crate) fn push(&mut self, request: Waiting) -> Result<(), Box<Waiting>> {
        if self.waiting >= self.most {
            return Err(Box::new(request));
        }
        let level = request.item.level;
        self.level(level).push(request).map_err(Box::new)?;
        self.waiting += 1;
        Ok(())
    }

    /// Takes back what ran without an answer, past the bound if need be. It goes before all others of its
    /// priority.
    pub(crate) fn put_back(&mut self, requests: Vec<Waiting>) {
        for request in requests {
            self.waiting += 1;
            let level = request.item.level;
            self.level(level).put_back(vec![request]);
        }
    }

    fn level(&mut self, level: u64) -> &mut Queue<Shapes, Ticket> {
        self.levels.entry(level).or_insert_with(|| Queue::new(usize::MAX))
    }

    /// What runs next: of the first priority of which something is ready.
    pub(crate) fn next(
        &mut self,
        limits: &Limits,
        punctual: Option<&Punctual<'_>>,
        now: Moment,
    ) -> Next<Shapes, Ticket> {
        let mut soonest: Option<Moment> = None;
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

    /// Takes out the requests for which `gone` holds. Looks at every request.
    pub(crate) fn take_if(&mut self, mut gone: impl FnMut(&Ticket) -> bool) {
        let of_level = self.levels.values_mut().flat_map(|queue| queue.take_if(&mut gone));
        let taken: Vec<Waiting> = of_level.collect();
        self.taken(taken.len());
    }

    /// Takes everything out, head first.
    pub(crate) fn drain_all(&mut self) -> Vec<Waiting> {
        self.waiting = 0;
        let levels = std::mem::take(&mut self.levels);
        levels.into_values().flat_map(|mut queue| queue.drain_all()).collect()
    }

    fn taken(&mut self, requests: usize) {
        self.waiting -= requests;
        self.levels.retain(|_, queue| !queue.is_empty());
    }

    /// The number of requests.
    pub(crate) fn len(&self) -> usize {
        self.waiting
    }

    /// Whether nothing waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting == 0
    }

    /// Rows of the requests that a new one of this priority would find before it, other deadlines aside.
    pub(crate) fn rows_before(&self, level: u64) -> u64 {
        self.levels.range(..=level).map(|(_, queue)| queue.rows()).sum()
    }
}
