//! What is remembered of one model.

use shadowslice_shared::units::Sms;

use super::super::{Live, Terms};
use super::curve::{Curve, Sample};
use super::demand::Demand;
use super::need::{self, Arrivals};

/// Demand is planned for with this much more.
const HEADROOM: f64 = 1.1;

/// Past the share at which a batch takes this part more than on the whole GPU, more SMs are wasted on it.
const KNEE_GAIN: f64 = 0.1;

/// One model.
#[derive(Debug, Clone)]
pub(super) struct Model {
    pub(super) curve: Curve,
    pub(super) demand: Demand,
    gpu: u32,
}

impl Model {
    pub(super) fn new(terms: &Terms, gpu: Sms) -> Self {
        let execution = terms.profile.as_ref().map(|profile| &profile.execution);
        Self { curve: Curve::new(execution), demand: Demand::default(), gpu: gpu.0 }
    }

    /// Learns from what was seen while it had about `sms` SMs; nothing from an interval in which
    /// its share changed.
    pub(super) fn observe(&mut self, live: &Live, settled: bool, sms: f64) {
        self.demand.observe(&live.seen);
        if settled {
            let sample = |executed: &super::super::Executed| Sample {
                rows: f64::from(executed.rows),
                count: executed.count as f64,
                seconds: executed.mean.as_secs_f64(),
            };
            let samples: Vec<Sample> = live.seen.executed.iter().map(sample).collect();
            self.curve.observe(&samples, live.share.0, sms);
        }
    }

    /// Whether enough is known to decide.
    pub(super) fn ready(&self, seconds: f64) -> bool {
        self.curve.known() && self.demand.observed() >= seconds
    }

    pub(super) fn max_batch(&self, terms: &Terms, share: Sms) -> u32 {
        need::max_batch(terms, &self.curve, f64::from(share.0))
    }

    fn arrivals(&self, rate: f64) -> Arrivals {
        Arrivals { rate: rate * HEADROOM, dispersion: self.demand.dispersion() }
    }

    /// What a part of the demand needs; the whole of its limit where nothing suffices.
    pub(super) fn need_at(&self, terms: &Terms, part: f64) -> u32 {
        self.need(terms, self.demand.forecast() * part)
    }

    /// What the peak may need again.
    pub(super) fn need_at_peak(&self, terms: &Terms) -> u32 {
        self.need(terms, self.demand.peak())
    }

    fn need(&self, terms: &Terms, rate: f64) -> u32 {
        if !self.curve.known() {
            return terms.min.0;
        }
        need::smallest(terms, &self.curve, self.gpu, self.arrivals(rate)).unwrap_or(self.gpu)
    }

    /// The most that it can use.
    pub(super) fn limit(&self, terms: &Terms) -> u32 {
        if !self.curve.known() {
            return terms.max.0;
        }
        let rows = f64::from(need::max_batch(terms, &self.curve, f64::from(self.gpu)));
        self.curve.knee(rows, self.gpu, KNEE_GAIN).min(terms.max.0).max(terms.min.0)
    }

    /// The part of the time in which it executes, if it has so many SMs.
    pub(super) fn busy(&self, terms: &Terms, sms: f64) -> f64 {
        if !self.curve.known() {
            return 1.0;
        }
        need::busy(terms, &self.curve, sms, self.demand.level())
    }
}
