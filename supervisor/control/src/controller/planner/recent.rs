//! The figures of a model over the last seconds. A single interval may contain no request.

use std::collections::VecDeque;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use shadowslice_datapath::pipeline::Rates;
use shadowslice_policy::sharing::Observation;

/// The time that the report covers. The interval in which this time is reached counts completely.
const WINDOW: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    span: Duration,
    answered: u64,
    in_time: u64,
    refused: u64,
    busy: Duration,
}

/// The sums of each interval in the last [`WINDOW`].
#[derive(Debug, Default)]
pub(super) struct Recent {
    /// The intervals, the oldest first.
    intervals: VecDeque<Sums>,
    all: Sums,
}

/// The figures of a model over the last seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct RecentReport {
    /// The time that the figures cover, in seconds. It is shorter after the start.
    pub span_s: f64,
    /// The number of requests per second, including refused requests, as in `status`.
    pub arrival_rate: f64,
    /// The requests answered within the SLO / the requests answered or refused. `None` without requests.
    pub attainment: Option<f64>,
    /// The fraction of the time in which a batch executed.
    pub busy: f64,
}

impl Sums {
    fn add(self, seen: Self) -> Self {
        Self {
            span: self.span + seen.span,
            answered: self.answered + seen.answered,
            in_time: self.in_time + seen.in_time,
            refused: self.refused + seen.refused,
            busy: self.busy + seen.busy,
        }
    }

    fn without(self, old: Self) -> Self {
        Self {
            span: self.span.saturating_sub(old.span),
            answered: self.answered - old.answered,
            in_time: self.in_time - old.in_time,
            refused: self.refused - old.refused,
            busy: self.busy.saturating_sub(old.busy),
        }
    }
}

impl Recent {
    pub(super) fn add(&mut self, seen: &Observation) {
        let &Observation { span, answered, in_time, refused, busy, .. } = seen;
        let new = Sums { span, answered, in_time, refused, busy: span.mul_f64(busy) };
        self.all = self.all.add(new);
        self.intervals.push_back(new);
        while let Some(oldest) = self.intervals.front().copied()
            && self.all.span.saturating_sub(oldest.span) >= WINDOW
        {
            self.intervals.pop_front();
            self.all = self.all.without(oldest);
        }
    }

    /// Returns the report. `rates` are the rates in `status`.
    pub(super) fn report(&self, rates: &Rates) -> RecentReport {
        let Sums { span, answered, in_time, refused, busy } = self.all;
        let (span_s, ended) = (span.as_secs_f64(), answered + refused);
        RecentReport {
            span_s,
            arrival_rate: rates.requests,
            attainment: (ended > 0).then(|| in_time as f64 / ended as f64),
            busy: if span_s > 0.0 { busy.as_secs_f64() / span_s } else { 0.0 },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_requests_are_seen_and_forgotten_after_ten_seconds() {
        let (mut recent, rates) = (Recent::default(), Rates { requests: 0.5, ..Rates::default() });
        assert_eq!(recent.report(&Rates::default()), RecentReport::default());
        let tenth = Observation { span: Duration::from_millis(100), ..Observation::default() };
        recent.add(&Observation {
            arrived: 3,
            answered: 2,
            in_time: 1,
            refused: 1,
            busy: 0.5,
            ..tenth.clone()
        });
        (0..49).for_each(|_| recent.add(&tenth));
        let RecentReport { span_s, arrival_rate, attainment, busy } = recent.report(&rates);
        assert_eq!((span_s, arrival_rate, attainment), (5.0, 0.5, Some(1.0 / 3.0)));
        assert!((busy - 0.01).abs() < 1e-9, "{busy}");
        (0..50).for_each(|_| recent.add(&tenth));
        assert_eq!((recent.report(&rates).span_s, recent.report(&rates).attainment), (10.0, Some(1.0 / 3.0)));
        recent.add(&tenth);
        assert_eq!((recent.report(&rates).span_s, recent.report(&rates).attainment), (10.0, None));
    }
}
