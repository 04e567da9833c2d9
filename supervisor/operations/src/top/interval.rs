//! The difference between two statuses of a model.

use crate::status::ModelStatus;
use shadowslice_datapath::pipeline::RequestCounts;

#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct Interval {
    /// The mean time that answered requests waited in the queue, in ms. `None` if no requests were
    /// answered.
    pub(super) wait_ms: Option<f64>,
    /// True if no request arrived or ended, and no request is queued or in flight.
    pub(super) idle: bool,
}

impl Interval {
    /// Compares two statuses. Returns `None` if the counters were reset in between, for example
    /// because the model was replaced.
    pub(super) fn between(before: &ModelStatus, after: &ModelStatus) -> Option<Self> {
        let counts = after.requests.since(&before.requests)?;
        let RequestCounts { accepted, succeeded, failed, rejected, invalid, cancelled, .. } = counts;
        let ended = succeeded + failed + rejected + invalid + cancelled;
        let waited = (after.queue_wait_s - before.queue_wait_s) * 1e3;
        Some(Self {
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
    fn an_interval_is_the_difference_of_two_statuses() {
        let between = |before, after| Interval::between(&before, &after);
        let interval = between(model(10, 10, 0, 1.0), model(30, 30, 4, 1.5)).unwrap();
        assert_eq!((interval.wait_ms, interval.idle), (Some(25.0), false));
        let none = between(model(10, 10, 0, 1.0), model(10, 10, 0, 1.0)).unwrap();
        assert_eq!((none.wait_ms, none.idle), (None, true));
        let begun = between(model(10, 10, 0, 1.0), model(11, 10, 0, 1.0)).unwrap();
        assert!(!begun.idle, "a request is in flight");
        assert_eq!(between(model(30, 30, 4, 1.5), model(2, 2, 0, 0.1)), None, "another instance");
    }
}
