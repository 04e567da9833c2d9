//! The arrivals of all models in the order of their times. They are drawn one by one.

use super::rate_curve::{RateCurve, RateSpan};
use crate::random::Random;
use crate::scenario::SimulatedArrival;
use crate::time::{NEVER, seconds_to_ns, timestamp};
use crate::timers::Timers;

/// The distribution of the gaps between arrivals. The mean gap is 1 divided by the rate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum GapDistribution {
    Exponential,
    Gamma { shape: f64 },
}

/// The arrivals of one model. Gaps are drawn for a rate of 1 and then divided by the current rate.
#[derive(Debug, Clone)]
pub(crate) struct ModelArrivals {
    random: Random,
    gaps: GapDistribution,
    curve: RateCurve,
    /// The mean rate, in requests per second.
    rate: f64,
    at: f64,
    step: RateSpan,
    end: f64,
}

impl ModelArrivals {
    pub(crate) fn new(random: Random, gaps: GapDistribution, curve: RateCurve, rate: f64, end: f64) -> Self {
        Self { random, gaps, curve, rate, at: 0.0, step: RateSpan { until: 0.0, factor: 0.0 }, end }
    }

    /// Returns the time of the next arrival in nanoseconds, or [`NEVER`] after the end.
    fn draw(&mut self) -> u64 {
        let mut gap = match self.gaps {
            GapDistribution::Exponential => self.random.exponential(),
            GapDistribution::Gamma { shape } => self.random.gamma(shape),
        };
        loop {
            let rate = self.rate * self.step.factor;
            let room = (self.step.until - self.at) * rate;
            if gap < room {
                self.at += gap / rate;
                // The comparison uses rounded times, so that a file with these arrivals contains
                // the same arrivals as the run.
                let at = seconds_to_ns(self.at);
                return if at < seconds_to_ns(self.end) { at } else { NEVER };
            }
            gap -= room;
            self.at = self.step.until;
            match self.curve.next() {
                Some(step) if self.at < self.end => self.step = step,
                _ => return NEVER,
            }
        }
    }
}

/// The arrivals of all models of a named load.
#[derive(Debug)]
pub struct ArrivalStream {
    streams: Vec<ModelArrivals>,
    next: Timers,
}

impl ArrivalStream {
    pub(crate) fn new(mut streams: Vec<ModelArrivals>) -> Self {
        let mut next = Timers::new(streams.len());
        for (model, stream) in streams.iter_mut().enumerate() {
            next.set(model, stream.draw());
        }
        Self { streams, next }
    }
}

impl Iterator for ArrivalStream {
    type Item = SimulatedArrival;

    fn next(&mut self) -> Option<SimulatedArrival> {
        let at = self.next.due();
        if at == NEVER {
            return None;
        }
        let model = self.next.first();
        self.next.set(model, self.streams[model].draw());
        Some(SimulatedArrival { at: timestamp(at), model })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::RandomPurpose;

    #[test]
    fn arrivals_that_round_to_the_end_do_not_occur() {
        let until = |end: f64| {
            let random = Random::new(1, RandomPurpose::Choice, 0);
            let curve = RateCurve::steps(&[(1.0, 1.0)], 100.0);
            ModelArrivals::new(random, GapDistribution::Exponential, curve, 1.0, end)
        };
        let mut drawn = until(100.0);
        let first = drawn.draw();
        assert_eq!(until(drawn.at + 1e-6).draw(), first);
        assert_eq!(until(drawn.at.next_up()).draw(), NEVER, "less than a nanosecond before the end");
    }
}
