//! The most work that can be done in time, by earliest deadline first.

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;
use std::time::Duration;

use shadowslice_shared::units::Moment;

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
        let ns = |moment: Moment| moment.since_origin().as_nanos() as f64;
        Self { at: ns(at), deadline: ns(at + slo), work }
    }

    /// Its arrival in whole nanoseconds.
    pub(super) fn at(&self) -> u64 {
        self.at as u64
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

/// The work that is left undone at its deadline, when `capacity` units of work are done per nanosecond;
/// the least that any order leaves. Jobs come in the order of their arrival.
pub(super) fn lost_work(jobs: &[Job], capacity: f64) -> f64 {
    let mut waiting = BinaryHeap::new();
    let mut now = 0.0;
    let mut lost = 0.0;
    for job in jobs {
        lost += work_until(&mut waiting, &mut now, job.at, capacity);
        now = job.at;
        waiting.push(*job);
    }
    lost + work_until(&mut waiting, &mut now, f64::INFINITY, capacity)
}

/// Works on what waits; returns what was lost.
fn work_until(waiting: &mut BinaryHeap<Job>, now: &mut f64, until: f64, capacity: f64) -> f64 {
    let mut lost = 0.0;
    while let Some(mut job) = waiting.peek_mut() {
        let end = job.deadline.min(until);
        if *now + job.work / capacity <= end + ROUNDING {
            *now = (*now + job.work / capacity).min(end).max(*now);
            PeekMut::pop(job);
            continue;
        }
        job.work -= (end - *now).max(0.0) * capacity;
        *now = end.max(*now);
        if job.deadline > until {
            break;
        }
        lost += job.work;
        PeekMut::pop(job);
    }
    lost
}
