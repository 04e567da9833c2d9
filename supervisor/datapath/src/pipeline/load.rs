//! The load of a model. Responses report this load to load balancers.

use std::time::Duration;

use shadowslice_shared::units::Timestamp;

/// The period over which a load is measured.
const SPAN: Duration = Duration::from_secs(1);

/// The load of a model in the last full second. All values are zero if no request ended in that
/// second.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ModelLoad {
    /// The mean latency divided by the SLO. A value above 1 means that requests are late on
    /// average.
    pub utilisation: f64,
    /// The number of requests answered per second.
    pub rate: f64,
    /// The number of requests refused or failed per second.
    pub errors: f64,
}

#[derive(Debug)]
pub(super) struct LoadMeter {
    began: Timestamp,
    parts: f64,
    answered: u32,
    errors: u32,
    last: ModelLoad,
}

impl LoadMeter {
    pub(super) fn new(now: Timestamp) -> Self {
        Self { began: now, parts: 0.0, answered: 0, errors: 0, last: ModelLoad::default() }
    }

    pub(super) fn count_answer(&mut self, latency: Duration, slo: Duration, now: Timestamp) {
        self.advance(now);
        self.answered += 1;
        self.parts += latency.as_secs_f64() / slo.as_secs_f64();
    }

    pub(super) fn count_error(&mut self, now: Timestamp) {
        self.advance(now);
        self.errors += 1;
    }

    pub(super) fn load(&mut self, now: Timestamp) -> ModelLoad {
        self.advance(now);
        self.last
    }

    fn advance(&mut self, now: Timestamp) {
        let span = now.since(self.began);
        if span < SPAN {
            return;
        }
        // After a pause without requests, the counts are not from the last second, so they are
        // discarded.
        let last = match span < SPAN * 2 {
            true => ModelLoad {
                utilisation: self.parts / f64::from(self.answered.max(1)),
                rate: f64::from(self.answered) / span.as_secs_f64(),
                errors: f64::from(self.errors) / span.as_secs_f64(),
            },
            false => ModelLoad::default(),
        };
        *self = Self { last, ..Self::new(now) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_is_that_of_the_last_full_second() {
        let (ms, at) = (Duration::from_millis, |ms| Timestamp::after_origin(Duration::from_millis(ms)));
        let mut meter = LoadMeter::new(at(0));
        meter.count_answer(ms(10), ms(20), at(100));
        meter.count_answer(ms(30), ms(20), at(200));
        meter.count_error(at(300));
        assert_eq!(meter.load(at(999)), ModelLoad::default(), "nothing is full yet");
        let load = ModelLoad { utilisation: 1.0, rate: 2.0, errors: 1.0 };
        assert_eq!(meter.load(at(1000)), load);
        meter.count_answer(ms(5), ms(20), at(1500));
        assert_eq!(meter.load(at(1999)), load);
        assert_eq!(meter.load(at(2000)), ModelLoad { utilisation: 0.25, rate: 1.0, errors: 0.0 });
        meter.count_answer(ms(5), ms(20), at(2100));
        assert_eq!(meter.load(at(9000)), ModelLoad::default(), "it has been idle");
    }
}
