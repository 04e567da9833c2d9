//! What was seen of a model over more than an interval, which few requests may leave out.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use shadowslice_policy::sharing::Seen;

/// The report covers one to two of these.
const SPAN: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    span: Duration,
    arrived: u64,
    answered: u64,
    in_time: u64,
    refused: u64,
    busy: Duration,
}

#[derive(Debug, Default)]
pub(super) struct Recent {
    before: Sums,
    now: Sums,
}

/// What was seen of a model in the last seconds.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct RecentReport {
    /// Which ones; fewer after the start.
    pub span_s: f64,
    /// Requests a second, refused ones included.
    pub arrival_rate: f64,
    /// Answered within the SLO / answered or refused; `None` if there was none.
    pub attainment: Option<f64>,
    /// The part of the time in which a batch executed.
    pub busy: f64,
}

impl Sums {
    fn add(self, seen: Self) -> Self {
        Self {
            span: self.span + seen.span,
            arrived: self.arrived + seen.arrived,
            answered: self.answered + seen.answered,
            in_time: self.in_time + seen.in_time,
            refused: self.refused + seen.refused,
            busy: self.busy + seen.busy,
        }
    }
}

impl Recent {
    pub(super) fn add(&mut self, seen: &Seen) {
        let &Seen { span, arrived, answered, in_time, refused, busy, .. } = seen;
        if self.now.span >= SPAN {
            self.before = std::mem::take(&mut self.now);
        }
        let busy = span.mul_f64(busy);
        self.now = self.now.add(Sums { span, arrived, answered, in_time, refused, busy });
    }

    pub(super) fn report(&self) -> RecentReport {
        let Sums { span, arrived, answered, in_time, refused, busy } = self.before.add(self.now);
        let (span_s, ended) = (span.as_secs_f64(), answered + refused);
        let each_second = |amount: f64| if span_s > 0.0 { amount / span_s } else { 0.0 };
        RecentReport {
            span_s,
            arrival_rate: each_second(arrived as f64),
            attainment: (ended > 0).then(|| in_time as f64 / ended as f64),
            busy: each_second(busy.as_secs_f64()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_requests_are_seen_and_forgotten_after_twenty_seconds() {
        let mut recent = Recent::default();
        assert_eq!(recent.report(), RecentReport::default());
        let tenth = Seen { span: Duration::from_millis(100), ..Seen::default() };
        recent.add(&Seen { arrived: 3, answered: 2, in_time: 1, refused: 1, busy: 0.5, ..tenth.clone() });
        (0..49).for_each(|_| recent.add(&tenth));
        let RecentReport { span_s, arrival_rate, attainment, busy } = recent.report();
        assert_eq!((span_s, arrival_rate, attainment), (5.0, 0.6, Some(1.0 / 3.0)));
        assert!((busy - 0.01).abs() < 1e-9, "{busy}");
        (0..149).for_each(|_| recent.add(&tenth));
        assert_eq!(recent.report().arrival_rate, 3.0 / 19.9);
        (0..2).for_each(|_| recent.add(&tenth));
        assert_eq!((recent.report().arrival_rate, recent.report().attainment), (0.0, None));
    }
}
