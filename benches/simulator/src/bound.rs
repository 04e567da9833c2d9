//! The fluid bound: the rate of requests answered in time if GPUs could divide work like a fluid,
//! without any loss.

use crate::loads::cheapest;
use crate::scenario::{Scenario, SimulatedArrival};
use crate::time::at_ns;

/// The length of a window in which requests are counted, in seconds.
const WINDOW_S: f64 = 1.0;

/// Returns the maximum number of requests per second that can be answered in time. Assumes that
/// each request has its minimum cost in SM·s, and that GPUs have no overhead.
///
/// For each window of arrivals and each GPU, this is a linear programme: maximise the number of
/// requests so that the sum of rate · cost is at most the GPU's SMs. All requests have the same
/// value, so the exact solution takes the cheapest requests first. The cost of a request is the
/// minimum of SM·s over all batch sizes and shares for which a batch takes at most half the SLO.
/// The other half of the SLO is left for the batch that may execute before the request's own batch.
///
/// In practice, every policy stays below the bound, because the bound ignores queueing, bursts
/// within a window, partial batches and contention. In theory, a policy could exceed the bound, for
/// three reasons. Overlapping batches on the same SMs may take less than the sum of their costs. A
/// batch may take more than half of the SLO. Work may move into the next window.
pub fn fluid(scenario: &Scenario, arrivals: &[SimulatedArrival], seconds: f64) -> f64 {
    let costs: Vec<f64> = scenario
        .models
        .iter()
        .map(|model| {
            let terms = &model.terms;
            cheapest(&model.truth, scenario.gpus[terms.gpu], terms.slo / 2, terms.max_batch)
        })
        .collect();
    let window = |arrival: &SimulatedArrival| at_ns(arrival.at) as f64 / 1e9 / WINDOW_S;
    let served = arrivals.chunk_by(|one, next| window(one) as u64 == window(next) as u64).map(|arrivals| {
        let begins = arrivals.first().map_or(0.0, |first| window(first).floor() * WINDOW_S);
        in_window(scenario, arrivals, &costs, (seconds - begins).min(WINDOW_S))
    });
    served.sum::<f64>() / seconds
}

/// Returns the maximum number of requests in one window that can be answered in time.
fn in_window(scenario: &Scenario, arrivals: &[SimulatedArrival], costs: &[f64], length_s: f64) -> f64 {
    let mut counts = vec![0.0_f64; costs.len()];
    for arrival in arrivals {
        counts[arrival.model] += 1.0;
    }
    let mut left: Vec<f64> = scenario.gpus.iter().map(|gpu| f64::from(gpu.0) * length_s).collect();
    let mut order: Vec<usize> = (0..costs.len()).collect();
    order.sort_by(|&one, &other| costs[one].total_cmp(&costs[other]));
    let mut served = 0.0;
    for model in order {
        let left = &mut left[scenario.models[model].terms.gpu];
        let count = counts[model].min(*left / costs[model]);
        *left -= count * costs[model];
        served += count;
    }
    served
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use shadowslice_shared::units::Timestamp;

    use super::*;
    use crate::scenario::fixtures::{model, on_one_gpu};

    /// Returns `counts` requests of each model, spread evenly over the second that begins at `from`.
    fn arrivals(from: u64, counts: &[u32]) -> Vec<SimulatedArrival> {
        let of = |(model, &count): (usize, &u32)| {
            (0..count).map(move |index| {
                let at = Duration::from_secs(from) + Duration::from_secs(1) * index / count;
                SimulatedArrival { at: Timestamp::after_origin(at), model }
            })
        };
        let mut all: Vec<SimulatedArrival> = counts.iter().enumerate().flat_map(of).collect();
        all.sort();
        all
    }

    /// Returns two models on a GPU with 100 SMs. A request to the first model takes 0.5 SM·s, and a
    /// request to the second model takes 0.1 SM·s.
    fn scenario() -> Scenario {
        on_one_gpu(100, vec![model("expensive", 10.0), model("cheap", 2.0)])
    }

    #[test]
    fn the_cheapest_requests_are_served_first() {
        let bound = |counts: &[u32]| fluid(&scenario(), &arrivals(0, counts), 1.0);
        assert!((bound(&[100, 500]) - 600.0).abs() < 0.01, "exactly full");
        assert!((bound(&[200, 500]) - 600.0).abs() < 0.01, "the expensive ones wait");
        assert!((bound(&[200, 2000]) - 1000.0).abs() < 0.01, "only cheap ones");
    }

    #[test]
    fn a_window_cannot_use_the_capacity_of_another() {
        let both = [arrivals(0, &[0, 2000]), arrivals(1, &[0, 100])].concat();
        assert!((fluid(&scenario(), &both, 2.0) - 1100.0 / 2.0).abs() < 0.01);
        let half = arrivals(0, &[0, 2000]).into_iter().take(1000).collect::<Vec<_>>();
        assert!((fluid(&scenario(), &half, 0.5) - 500.0 / 0.5).abs() < 0.01, "a window that is cut short");
    }

    #[test]
    fn half_of_the_slo_is_reserved_for_waiting() {
        let mut scenario = scenario();
        // With an SLO of 8 ms, the bound only considers batches of at most 4 ms.
        scenario.models[1].terms.slo = Duration::from_millis(8);
        let execution = &mut scenario.models[1].truth.execution;
        *execution = {
            use shadowslice_shared::profile::{Execution, ExecutionRow};
            use shadowslice_shared::units::Sms;
            Execution::new(vec![Sms(10), Sms(100)], vec![ExecutionRow { batch: 1, ms: vec![6.0, 2.0] }])
                .unwrap()
        };
        // On 10 SMs, a request would cost only 0.06 SM·s, but its batch would take 6 ms, which
        // exceeds 4 ms.
        let bound = fluid(&scenario, &arrivals(0, &[0, 2000]), 1.0);
        assert!(bound < 700.0, "{bound}");
    }
}
