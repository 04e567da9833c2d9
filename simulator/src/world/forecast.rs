//! The supervisor's predictions, remembered between two observations since every request asks for some.

use std::time::Duration;

use shadowslice_policy::latency::Predictor;
use shadowslice_shared::units::Sms;

/// Rows up to which predictions are remembered.
const REMEMBERED: usize = 64;

#[derive(Debug)]
pub(super) struct Forecast {
    predictor: Predictor,
    remembered: [Option<Duration>; REMEMBERED],
}

impl Forecast {
    pub(super) fn new(predictor: Predictor) -> Self {
        Self { predictor, remembered: [None; REMEMBERED] }
    }

    /// How long a batch should take; no time, as long as nothing is known.
    pub(super) fn time(&mut self, rows: u32) -> Duration {
        let predict = || self.predictor.predict(rows).unwrap_or(Duration::ZERO);
        match self.remembered.get_mut(rows as usize) {
            Some(remembered) => *remembered.get_or_insert_with(predict),
            None => predict(),
        }
    }

    pub(super) fn observe(&mut self, rows: u32, took: Duration) {
        self.predictor.observe(rows, took);
        self.remembered = [None; REMEMBERED];
    }

    pub(super) fn reset_to(&mut self, sms: Sms) {
        self.predictor.reset_to(sms);
        self.remembered = [None; REMEMBERED];
    }
}
