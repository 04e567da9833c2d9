//! Arrivals of all models in the order of time, drawn one by one.

use super::rate_curve::{RateCurve, RateSpan};
use crate::random::Random;
use crate::scenario::SimulatedArrival;
use crate::time::{NEVER, moment, seconds_to_ns};
use crate::timers::Timers;

/// The mean gap is 1 over the rate.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum GapDistribution {
    Exponential,
    Gamma { shape: f64 },
}

/// Of one model: gaps drawn at a rate of 1, stretched by the rate in force.
#[derive(Debug, Clone)]
pub(crate) struct ModelArrivals {
    random: Random,
    gaps: GapDistribution,
    course: RateCurve,
    /// Requests per second on average.
    rate: f64,
    at: f64,
    step: RateSpan,
    end: f64,
}

impl ModelArrivals {
    pub(crate) fn new(random: Random, gaps: GapDistribution, course: RateCurve, rate: f64, end: f64) -> Self {
        Self { random, gaps, course, rate, at: 0.0, step: RateSpan { until: 0.0, factor: 0.0 }, end }
    }

    /// In nanoseconds; [`NEVER`] past the end.
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
                // As a file of the load would have it: the time is rounded when it is written.
                let at = seconds_to_ns(self.at);
                return if at < seconds_to_ns(self.end) { at } else { NEVER };
            }
            gap -= room;
            self.at = self.step.until;
            match self.course.next() {
                Some(step) if self.at < self.end => self.step = step,
                _ => return NEVER,
            }
        }
    }
}

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
        Some(SimulatedArrival { at: moment(at), model })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::RandomPurpose;

    #[test]
    fn what_is_written_as_of_the_end_does_not_come() {
        let until = |end: f64| {
            let random = Random::new(1, RandomPurpose::Choice, 0);
            let course = RateCurve::steps(&[(1.0, 1.0)], 100.0);
            ModelArrivals::new(random, GapDistribution::Exponential, course, 1.0, end)
        };
        let mut drawn = until(100.0);
        let first = drawn.draw();
        assert_eq!(until(drawn.at + 1e-6).draw(), first);
        assert_eq!(until(drawn.at.next_up()).draw(), NEVER, "less than a nanosecond before the end");
    }
}
