//! What happened to a model between two statuses.

use std::time::Duration;

use crate::status::ModelStatus;
use shadowslice_datapath::pipeline::Counts;

#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct Rates {
    /// Requests that came to an end, each second.
    pub(super) requests: f64,
    pub(super) refused: f64,
    pub(super) failed: f64,
    /// How long the answered requests waited in the queue, in the mean; `None` without any.
    pub(super) wait_ms: Option<f64>,
    /// No request ended, none came, and none is there.
    pub(super) idle: bool,
}

impl Rates {
    /// `None` if the counters began anew in between, as those of a replaced model do.
    pub(super) fn between(before: &ModelStatus, after: &ModelStatus, span: Duration) -> Option<Self> {
        let counts = after.requests.since(&before.requests)?;
        let Counts { accepted, succeeded, failed, rejected, invalid, cancelled, .. } = counts;
        let ended = succeeded + failed + rejected + invalid + cancelled;
        let seconds = span.as_secs_f64().max(1e-3);
        let waited = (after.queue_wait_s - before.queue_wait_s) * 1e3;
        Some(Self {
            requests: ended as f64 / seconds,
            refused: rejected as f64 / seconds,
            failed: failed as f64 / seconds,
            wait_ms: (succeeded > 0 && waited >= 0.0).then(|| waited / succeeded as f64),
            idle: ended == 0 && accepted == 0 && after.queue == 0 && after.in_flight == 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(accepted: u64, succeeded: u64, rejected: u64, queue_wait_s: f64) -> ModelStatus {
        let mut model = ModelStatus { queue_wait_s, ..ModelStatus::default() };
        (model.requests.accepted, model.requests.succeeded) = (accepted, succeeded);
        model.requests.rejected = rejected;
        model
    }

    #[test]
    fn rates_are_differences_by_time() {
        let between = |before, after| Rates::between(&before, &after, Duration::from_secs(2));
        let rates = between(model(10, 10, 0, 1.0), model(30, 30, 4, 1.5)).unwrap();
        assert_eq!((rates.requests, rates.refused, rates.failed), (12.0, 2.0, 0.0));
        assert_eq!((rates.wait_ms, rates.idle), (Some(25.0), false));
        let none = between(model(10, 10, 0, 1.0), model(10, 10, 0, 1.0)).unwrap();
        assert_eq!((none.requests, none.wait_ms, none.idle), (0.0, None, true));
        let begun = between(model(10, 10, 0, 1.0), model(11, 10, 0, 1.0)).unwrap();
        assert!(!begun.idle, "a request is under way");
        assert_eq!(between(model(30, 30, 4, 1.5), model(2, 2, 0, 0.1)), None, "another instance");
    }
}
