//! The next batch of a lane, by greedy rules that know the deadlines and the arrivals to come.

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
    /// From arrival to answer, in nanoseconds.
    pub(super) slo: u64,
    /// How long batches of one, two, ... requests take with its share, in nanoseconds.
    pub(super) ns: &'m [u64],
    /// Those that count, also to come.
    pub(super) arrivals: &'m [u64],
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
        if shortest > self.slo {
            return None;
        }
        let oldest = self.first_in_time(self.from, now, 1);
        let now = now.max(*self.arrivals.get(oldest)?);
        let all = self.most(oldest, now);
        if self.makes_it(oldest, now, all)
            && (style == Style::Eager || self.others_make_it(oldest + all, now + self.ns(all)))
        {
            return Some(Batch { at: now, first: oldest, requests: all });
        }
        let careful = self.careful(oldest, now, all);
        Some(careful.unwrap_or_else(|| self.most_per_time(oldest, now, all, style)))
    }

    /// The oldest requests, as many as make it, if that makes none of the others late.
    fn careful(&self, oldest: usize, now: u64, all: usize) -> Option<Batch> {
        let requests = (1..all).rev().find(|&batch| self.makes_it(oldest, now, batch))?;
        self.others_make_it(oldest + requests, now + self.ns(requests)).then_some(Batch {
            at: now,
            first: oldest,
            requests,
        })
    }

    /// Whether all that wait at `then` can be answered by one batch, from this one on.
    fn others_make_it(&self, from: usize, then: u64) -> bool {
        let others = self.most(from, then);
        others == 0 || self.makes_it(from, then, others)
    }

    /// The batch that answers the most per time until it ends, where so many wait. Gives up those that are too old for it.
    fn most_per_time(&self, oldest: usize, now: u64, all: usize, style: Style) -> Batch {
        let largest = match style {
            Style::Eager => all,
            Style::Patient => (self.arrivals.len() - oldest).min(self.ns.len()),
        };
        let mut best = Batch { at: now, first: oldest, requests: 1 };
        let mut each = self.ns(1) as f64;
        for requests in (2..=largest).rev() {
            let ns = self.ns(requests);
            // To be better it must end before this.
            let end = now + (each * requests as f64) as u64;
            let Some(latest) = end.checked_sub(ns + 1).filter(|&latest| latest >= now && ns <= self.slo)
            else {
                continue;
            };
            let latest = if style == Style::Eager { now } else { latest };
            if let Some(better) = self.soonest(oldest, now, requests, latest) {
                each = (better.at - now + ns) as f64 / requests as f64;
                best = better;
            }
        }
        best
    }

    /// A batch of so many as soon as they are there, if that is not after `latest`.
    fn soonest(&self, oldest: usize, now: u64, requests: usize, latest: u64) -> Option<Batch> {
        if *self.arrivals.get(oldest + requests - 1)? > latest {
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
        let there = &self.arrivals[..(from + self.ns.len()).min(self.arrivals.len())];
        first_at(there, from, moment + 1) - from
    }

    /// Whether this request is answered in time by a batch of so many.
    fn makes_it(&self, request: usize, start: u64, requests: usize) -> bool {
        let by = (start + self.ns(requests)).saturating_sub(self.slo);
        self.arrivals.get(request).is_none_or(|&at| at >= by)
    }

    /// The first request from `from` on that is answered in time by a batch of so many.
    fn first_in_time(&self, from: usize, start: u64, requests: usize) -> usize {
        first_at(self.arrivals, from, (start + self.ns(requests)).saturating_sub(self.slo))
    }

    fn ns(&self, requests: usize) -> u64 {
        self.ns[requests - 1]
    }
}

/// The first index from `from` on whose arrival is not before `moment`; gallops, for it is mostly near.
pub(super) fn first_at(arrivals: &[u64], from: usize, moment: u64) -> usize {
    if arrivals.get(from).is_none_or(|&at| at >= moment) {
        return from.min(arrivals.len());
    }
    let mut reach = 1;
    while from + reach <= arrivals.len() && arrivals[from + reach - 1] < moment {
        reach *= 2;
    }
    let (low, high) = (from + reach / 2, (from + reach).min(arrivals.len()));
    low + arrivals[low..high].partition_point(|&at| at < moment)
}
