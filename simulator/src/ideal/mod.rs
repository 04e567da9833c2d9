//! What a clairvoyant could do.
//!
//! It knows every arrival and the true execution times, and divides each GPU's SMs anew, for free, at
//! every [`SLOT`], in steps of the share grid; shares never add up to more than the GPU. A model runs
//! one batch at a time, which goes on at the new speed when its share changes. It keeps the models'
//! `min` and `max` (the mins only if they fit together) and may give up any request at any time.
//!
//! The objective is the policy's: lexicographic by priority, within a priority max-min attainment of
//! the whole load, then goodput. To find the optimum is intractable (even one lane is scheduling of
//! batches with deadlines), so this is a search of three parts:
//!
//! * a `lane` batches greedily with knowledge of the deadlines;
//! * `divide` chooses the shares of a slot by rolling each lane out from where it really stands,
//!   for every share of the grid, over the arrivals of a horizon: the least shares that answer
//!   everything if they fit, else the fairest attainments, then dynamic programming for the most
//!   answers;
//! * `search` does that several ways and takes the best: once for the whole load, which is the best
//!   static partition, and slot by slot, with and without a guarantee of what the static shares would
//!   answer.
//!
//! The static partition is one of the candidates, so the result is no worse than that, except by
//! hundredths of an attainment that buy goodput, or what lower classes get. A lane was measured to be
//! within 2 % of the optimum for its share, which dynamic programming finds when time is coarse; what
//! better shares could still bring is not known, but no more than the [bound](crate::bound) says.
//! Takes `O(slots · models · (steps · batches in the horizon + steps²))` where not everything can be
//! answered, far less where it can.

mod batching;
mod divide;
mod lane;
mod search;
mod times;

use std::time::Duration;

use shadowslice_shared::units::Sms;

use crate::scenario::{Arrival, Scenario, Served};
use lane::Model;
use times::Times;

/// How often the SMs are divided anew.
pub const SLOT: Duration = Duration::from_millis(10);

/// What a clairvoyant achieves.
#[derive(Debug, Clone, PartialEq)]
pub struct Ideal {
    /// All models together.
    pub total: Outcome,
    /// The models.
    pub models: Vec<Outcome>,
}

/// What a clairvoyant achieves for a model, or for all.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Outcome {
    /// Requests that came.
    pub offered: u64,
    /// Requests answered in time.
    pub in_time: u64,
    /// The same per second of the span.
    pub goodput_rps: f64,
    /// Answered in time out of offered; 1 if nothing was offered.
    pub attainment: f64,
}

impl Outcome {
    fn new(offered: u64, in_time: u64, span: Duration) -> Self {
        let goodput_rps = if span.is_zero() { 0.0 } else { in_time as f64 / span.as_secs_f64() };
        let attainment = if offered == 0 { 1.0 } else { in_time as f64 / offered as f64 };
        Self { offered, in_time, goodput_rps, attainment }
    }
}

/// The clairvoyant's result for this load; rates are per second of `span`.
pub fn run(scenario: &Scenario, arrivals: &[Arrival], span: Duration) -> Ideal {
    let models = models(scenario, arrivals);
    let mut in_time = vec![0; models.len()];
    for (gpu, sms) in scenario.gpus.iter().enumerate() {
        let (members, there): (Vec<usize>, Vec<&Model>) =
            models.iter().enumerate().filter(|(_, model)| model.gpu == gpu && model.max > 0).unzip();
        for (member, answered) in members.into_iter().zip(search::best(&there, steps(*sms))) {
            in_time[member] = answered;
        }
    }
    let offered = || models.iter().map(|model| model.arrivals.len() as u64);
    Ideal {
        total: Outcome::new(offered().sum(), in_time.iter().sum(), span),
        models: offered()
            .zip(in_time)
            .map(|(offered, in_time)| Outcome::new(offered, in_time, span))
            .collect(),
    }
}

fn models(scenario: &Scenario, arrivals: &[Arrival]) -> Vec<Model> {
    let mut own = vec![Vec::new(); scenario.models.len()];
    for arrival in arrivals {
        if let Some(own) = own.get_mut(arrival.model) {
            own.push(nanos(arrival.at.since_origin()));
        }
    }
    scenario.models.iter().zip(own).map(|(served, arrivals)| model(scenario, served, arrivals)).collect()
}

fn model(scenario: &Scenario, served: &Served, mut arrivals: Vec<u64>) -> Model {
    arrivals.sort_unstable();
    let terms = &served.terms;
    let gpu = scenario.gpus.get(terms.gpu).copied().unwrap_or(Sms(0));
    let max = steps(terms.max.min(gpu));
    Model {
        gpu: terms.gpu,
        priority: terms.priority,
        max,
        slo: nanos(terms.slo),
        times: Times::new(served, max, arrivals.len()),
        arrivals,
    }
}

/// The steps of the share grid in so many SMs.
fn steps(sms: Sms) -> usize {
    (sms.0 / Sms::STEP) as usize
}

/// Nanoseconds, of which 64 bits hold centuries.
const fn nanos(duration: Duration) -> u64 {
    let ns = duration.as_nanos();
    if ns > u64::MAX as u128 { u64::MAX } else { ns as u64 }
}

#[cfg(test)]
mod tests;
