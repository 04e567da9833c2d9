//! The mean rates of the named loads.

use std::time::Duration;

use shadowslice_shared::profile::Profile;
use shadowslice_shared::units::Sms;

use crate::scenario::Scenario;

/// The largest batch that [`cheapest`] tries. Even larger batches do not reduce the cost per row.
const LARGEST_BATCH: u32 = 1024;

/// Returns the minimum cost of a request in SM·s, over all combinations of batch size and share
/// that meet the SLO. If no combination meets the SLO, returns the minimum over all combinations.
pub fn cheapest(profile: &Profile, gpu: Sms, slo: Duration, max_batch: u32) -> f64 {
    let batches = 1..=max_batch.clamp(1, LARGEST_BATCH);
    let shares = || (Sms::STEP.min(gpu.0)..=gpu.0).step_by(Sms::STEP as usize);
    let points = batches.flat_map(|batch| shares().map(move |sms| (batch, f64::from(sms))));
    let (mut within, mut beyond) = (f64::INFINITY, f64::INFINITY);
    for (batch, sms) in points {
        let time = profile.execution.time(batch, sms);
        let cost = sms * time.as_secs_f64() / f64::from(batch);
        let least = if time <= slo { &mut within } else { &mut beyond };
        *least = least.min(cost);
    }
    if within.is_finite() { within } else { beyond }
}

/// Returns the rate of each model, in requests per second. At these rates, requests with the
/// minimum cost use the fraction `utilisation` of each GPU. `weights` divides that fraction among
/// the models of the GPU.
pub(crate) fn rates(scenario: &Scenario, utilisation: f64, weights: &[f64]) -> Vec<f64> {
    let mut totals = vec![0.0; scenario.gpus.len()];
    for (model, weight) in scenario.models.iter().zip(weights) {
        totals[model.terms.gpu] += weight;
    }
    let rate = |(model, weight): (&crate::scenario::ScenarioModel, &f64)| {
        let terms = &model.terms;
        let gpu = scenario.gpus[terms.gpu];
        let sms = utilisation * f64::from(gpu.0) * weight / totals[terms.gpu];
        sms / cheapest(&model.truth, gpu, terms.slo, terms.max_batch)
    };
    scenario.models.iter().zip(weights).map(rate).collect()
}
