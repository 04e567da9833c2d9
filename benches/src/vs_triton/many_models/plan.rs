//! The requests of the comparison, which are the same for every server.

use std::time::Duration;

use shadowslice_tests::load::{ArrivalPattern, LoadPlan};
use shadowslice_tests::random::SplitMix64;

/// The number of models.
pub(super) const MODELS: usize = 40;

/// The seed of the arrivals and of the models.
const SEED: u64 = 7;

/// A request that the client sends at a planned time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct PlannedRequest {
    /// The time since the start of the load.
    pub(super) at: Duration,
    /// The index of the model. Model 0 gets most requests.
    pub(super) model: usize,
}

/// Returns requests with random arrivals, at `per_second` requests per second on average. The models follow
/// Zipf's law with exponent 1.
pub(super) fn planned_requests(per_second: f64, span: Duration) -> Vec<PlannedRequest> {
    let arrivals = LoadPlan { rate: per_second, span, arrivals: ArrivalPattern::Poisson, seed: SEED };
    let mut random = SplitMix64::new(SEED + 1);
    let request = |at| PlannedRequest { at, model: zipf_model(random.fraction()) };
    arrivals.schedule().into_iter().map(request).collect()
}

/// Returns the model whose part of the distribution contains `fraction`, which is in [0, 1). Model `n` has
/// a part of the size 1 / (n + 1), divided by the sum of all parts.
fn zipf_model(fraction: f64) -> usize {
    let part = |model: usize| 1.0 / (model + 1) as f64;
    let mut left = fraction * (0..MODELS).map(part).sum::<f64>();
    let precedes = |model: &usize| {
        left -= part(*model);
        left >= 0.0
    };
    (0..MODELS - 1).take_while(precedes).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_follow_zipfs_law_and_are_always_the_same() {
        let requests = planned_requests(1_000.0, Duration::from_secs(100));
        assert_eq!(requests, planned_requests(1_000.0, Duration::from_secs(100)));
        let share = |model| {
            requests.iter().filter(|request| request.model == model).count() as f64 / requests.len() as f64
        };
        // The sum of 1 to 1/40 is 4.2785.
        for model in [0, 1, 9, 39] {
            let expected = 1.0 / (model + 1) as f64 / 4.2785;
            assert!((share(model) / expected - 1.0).abs() < 0.1, "model {model}: {}", share(model));
        }
        assert!(requests.is_sorted_by(|one, next| one.at <= next.at));
        assert!((99_000..101_000).contains(&requests.len()), "{}", requests.len());
    }

    #[test]
    fn every_fraction_has_a_model() {
        assert_eq!(zipf_model(0.0), 0);
        assert_eq!(zipf_model(0.2337), 0, "1 / 4.2785 is 0.23373");
        assert_eq!(zipf_model(0.2338), 1);
        assert_eq!(zipf_model(1.0_f64.next_down()), MODELS - 1);
    }
}
