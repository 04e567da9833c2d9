//! The next batch of a lane, by greedy rules that know the deadlines and the arrivals to come.

use super::lane::Model;

/// What to do when not all can be answered in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Style {
    /// Start with what waits.
    Eager,
    /// Wait for more if that answers more per time, and look one batch further.
    Patient,
}

/// The requests of a lane that are not served yet, and its share.
pub(super) struct Waiting<'m> {
    pub(super) model: &'m Model,
    /// Those that count, also to come.
    pub(super) arrivals: &'m [u64],
    /// The share, in steps.
    pub(super) level: usize,
    /// The first request that is not served yet.
    pub(super) from: usize,
}

/// A batch to start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Batch {
    /// When.
    pub(super) at: u64,
    /// Its oldest request.
    pub(super) first: usize,
    /// How many requests, in the order of their arrival.
    pub(super) requests: usize,
}

impl Waiting<'_> {
    /// The next batch of a lane that is free from `now` on; nothing if no request can be answered in
    /// time.
    pub(super) fn next_batch(&self, now: u64, style: Style) -> Option<Batch> {
        let shortest = self.ns(1);
        if shortest > self.model.slo {
            return None;
        }
        let oldest = self.first_in_time(self.from, now, 1);
        let now = now.max(*self.arrivals.get(oldest)?);
        let all = self.most(oldest, now);
        if self.first_in_time(oldest, now, all) == oldest
            && (style == Style::Eager || self.others_make_it(oldest + all, now + self.ns(all)))
        {
            return Some(Batch { at: now, first: oldest, requests: all });
        }
        let careful = self.careful(oldest, now, all);
        Some(careful.unwrap_or_else(|| self.most_per_time(oldest, now, style)))
    }

    /// The oldest requests, as many as make it, if that makes none of the others late.
    fn careful(&self, oldest: usize, now: u64, all: usize) -> Option<Batch> {
        let requests = (1..all).rev().find(|&batch| self.first_in_time(oldest, now, batch) == oldest)?;
        self.others_make_it(oldest + requests, now + self.ns(requests)).then_some(Batch {
            at: now,
            first: oldest,
            requests,
        })
    }

    /// Whether all that wait at `then` can be answered by one batch, from this one on.
    fn others_make_it(&self, from: usize, then: u64) -> bool {
        let others = self.most(from, then);
        others == 0 || self.first_in_time(from, then, others) == from
    }

    /// The batch that answers the most per time until it ends. Gives up those that are too old for it.
    fn most_per_time(&self, oldest: usize, now: u64, style: Style) -> Batch {
        let largest = (self.arrivals.len() - oldest).min(self.model.times.max_batch());
        let mut best = Batch { at: now, first: oldest, requests: 1 };
        for requests in (2..=largest).rev() {
            // To be better it must end before this.
            let rate = (best.at - now + self.ns(best.requests)) as f64 / best.requests as f64;
            let end = now + (rate * requests as f64) as u64;
            let Some(latest) = end.checked_sub(self.ns(requests) + 1).filter(|&latest| latest >= now) else {
                continue;
            };
            let latest = if style == Style::Eager { now } else { latest };
            best = self.soonest(oldest, now, requests, latest).unwrap_or(best);
        }
        best
    }

    /// A batch of so many as soon as they are there, if that is not after `latest`.
    fn soonest(&self, oldest: usize, now: u64, requests: usize, latest: u64) -> Option<Batch> {
        if self.ns(requests) > self.model.slo {
            return None;
        }
        let (mut first, mut at) = (oldest, now);
        loop {
            let in_time = self.first_in_time(first, at, requests);
            let last = *self.arrivals.get(in_time + requests - 1)?;
            if last > latest {
                return None;
            }
            if last <= at && in_time == first {
                return Some(Batch { at, first, requests });
            }
            (first, at) = (in_time, at.max(last));
        }
    }

    /// How many from `from` on have arrived by `moment` and fit into a batch.
    fn most(&self, from: usize, moment: u64) -> usize {
        (first_at(self.arrivals, from, moment + 1) - from).min(self.model.times.max_batch())
    }

    /// The first request from `from` on that is answered in time by a batch of so many.
    fn first_in_time(&self, from: usize, start: u64, requests: usize) -> usize {
        first_at(self.arrivals, from, (start + self.ns(requests)).saturating_sub(self.model.slo))
    }

    fn ns(&self, requests: usize) -> u64 {
        self.model.times.ns(self.level, requests)
    }
}

/// The first index from `from` on whose arrival is not before `moment`; gallops, for it is mostly near.
pub(super) fn first_at(arrivals: &[u64], from: usize, moment: u64) -> usize {
    let from = from.min(arrivals.len());
    let mut reach = 1;
    while from + reach <= arrivals.len() && arrivals[from + reach - 1] < moment {
        reach *= 2;
    }
    let (low, high) = (from + reach / 2, (from + reach).min(arrivals.len()));
    low + arrivals[low..high].partition_point(|&at| at < moment)
}
