//! The most work that can be done in time, by earliest deadline first.

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;
use std::time::Duration;

use shadowslice_shared::units::Moment;

use crate::time::ns;

/// Work that is to be done between an arrival and a deadline; in nanoseconds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Job {
    at: f64,
    deadline: f64,
    work: f64,
}

/// What is left of a job and no more than this part of a unit of time is rounding.
const ROUNDING: f64 = 1e-2;

impl Job {
    pub(super) fn new(at: Moment, slo: Duration, work: f64) -> Self {
        let (at, slo) = (ns(at.since_origin()), ns(slo));
        Self { at: at as f64, deadline: at.saturating_add(slo) as f64, work }
    }
}

impl Ord for Job {
    /// The earliest deadline is the greatest, for that is what a heap yields.
    fn cmp(&self, other: &Self) -> Ordering {
        other.deadline.total_cmp(&self.deadline)
    }
}

impl PartialOrd for Job {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Job {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Job {}

/// The work that is left undone at its deadline, the least that any order leaves.
pub(super) struct Sweep {
    /// Units of work that are done per nanosecond.
    capacity: f64,
    waiting: BinaryHeap<Job>,
    now: f64,
    lost: f64,
}

impl Sweep {
    pub(super) fn new(capacity: f64) -> Self {
        Self { capacity, waiting: BinaryHeap::new(), now: 0.0, lost: 0.0 }
    }

    /// The next job, in the order of their arrival.
    pub(super) fn arrive(&mut self, job: Job) {
        self.work_until(job.at);
        self.now = job.at;
        self.waiting.push(job);
    }

    /// What is left undone when no more jobs come.
    pub(super) fn lost(mut self) -> f64 {
        self.work_until(f64::INFINITY);
        self.lost
    }

    fn work_until(&mut self, until: f64) {
        while let Some(mut job) = self.waiting.peek_mut() {
            let end = job.deadline.min(until);
            let done = self.now + job.work / self.capacity;
            if done <= end + ROUNDING {
                self.now = done.min(end).max(self.now);
                PeekMut::pop(job);
                continue;
            }
            job.work -= (end - self.now).max(0.0) * self.capacity;
            self.now = end.max(self.now);
            if job.deadline > until {
                break;
            }
            self.lost += job.work;
            PeekMut::pop(job);
        }
    }
}
