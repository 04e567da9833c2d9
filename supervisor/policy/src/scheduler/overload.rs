//! The detector of overload. Under overload, models with `on_late: reject` refuse late requests.
//!
//! A late answer is usually better than no answer, so the requests of a burst are served even if they
//! are late. If the queue has not been empty for a long time, the load exceeds the lane's throughput.
//! If the model continued to serve late requests, all requests would become late. The scheduler
//! therefore refuses late requests until the queue is empty again, as in CoDel. A queue that grew while
//! no worker served is not a sign of overload, and never causes refusals.

use std::time::Duration;

use shadowslice_shared::units::Timestamp;

/// The minimum duration of a backlog that counts as overload, for any SLO. A shorter backlog is a
/// burst.
const MIN_BACKLOG: Duration = Duration::from_secs(1);

/// The minimum duration of a backlog that counts as overload, as a multiple of the SLO.
const BACKLOG_PER_SLO: u32 = 10;

/// The state of the queue.
#[derive(Debug, Clone, Copy)]
enum QueueState {
    /// The queue is empty.
    Empty,
    /// The queue has not been empty since this time.
    Since(Timestamp),
    /// An outage occurred after the queue was last empty.
    Disturbed,
}

/// The detector of overload in the queues of one model.
#[derive(Debug, Clone)]
pub(super) struct OverloadDetector {
    /// The maximum duration of a backlog that does not count as overload.
    tolerated: Duration,
    queue: QueueState,
}

impl OverloadDetector {
    pub(super) fn new(slo: Duration) -> Self {
        let tolerated = slo.saturating_mul(BACKLOG_PER_SLO).max(MIN_BACKLOG);
        Self { tolerated, queue: QueueState::Empty }
    }

    /// Records that the lane took the last request from the queue. Don't call this if the queue is
    /// empty because clients disconnected.
    pub(super) fn on_emptied(&mut self) {
        self.queue = QueueState::Empty;
    }

    /// Records that at least one request is queued.
    pub(super) fn on_queued(&mut self, now: Timestamp) {
        if let QueueState::Empty = self.queue {
            self.queue = QueueState::Since(now);
        }
    }

    /// Records an outage.
    pub(super) fn on_disturbance(&mut self) {
        self.queue = QueueState::Disturbed;
    }

    /// Returns true if the next request must be refused. `deadline` is its deadline.
    pub(super) fn refuses(&self, deadline: Timestamp, now: Timestamp) -> bool {
        match self.queue {
            QueueState::Since(start) => deadline < now && now.since(start) >= self.tolerated,
            QueueState::Empty | QueueState::Disturbed => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Timestamp {
        Timestamp::after_origin(Duration::from_millis(ms))
    }

    fn backlog_since_zero(slo_ms: u64) -> OverloadDetector {
        let mut overload = OverloadDetector::new(Duration::from_millis(slo_ms));
        overload.on_queued(ms(0));
        overload.on_queued(ms(700));
        overload
    }

    #[test]
    fn a_burst_is_served_however_late() {
        let overload = backlog_since_zero(20);
        assert!(!overload.refuses(ms(20), ms(999)));
        let slow = backlog_since_zero(500);
        assert!(!slow.refuses(ms(20), ms(4_999)), "ten times the objective, not one second");
    }

    #[test]
    fn sustained_overload_sheds_the_late_and_only_them() {
        let overload = backlog_since_zero(20);
        assert!(overload.refuses(ms(999), ms(1_000)));
        assert!(!overload.refuses(ms(1_000), ms(1_000)), "due now is not late");
        assert!(backlog_since_zero(500).refuses(ms(20), ms(5_000)));
    }

    #[test]
    fn an_emptied_queue_starts_afresh() {
        let mut overload = backlog_since_zero(20);
        overload.on_emptied();
        assert!(!overload.refuses(ms(20), ms(1_500)));
        overload.on_queued(ms(1_600));
        assert!(!overload.refuses(ms(1_620), ms(2_599)));
        assert!(overload.refuses(ms(1_620), ms(2_600)));
    }

    #[test]
    fn an_outage_turns_nobody_away_until_the_queue_was_empty() {
        let mut overload = backlog_since_zero(20);
        overload.on_disturbance();
        overload.on_queued(ms(1_100));
        assert!(!overload.refuses(ms(20), ms(60_000)));
        overload.on_emptied();
        overload.on_queued(ms(60_001));
        assert!(overload.refuses(ms(60_021), ms(61_001)));
    }

    #[test]
    fn an_outage_counts_though_the_queue_was_empty_when_it_began() {
        let mut overload = OverloadDetector::new(Duration::from_millis(20));
        overload.on_disturbance();
        overload.on_queued(ms(0));
        assert!(!overload.refuses(ms(20), ms(60_000)));
    }
}
