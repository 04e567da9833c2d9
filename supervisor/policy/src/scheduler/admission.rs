//! Admission control. It applies the sharing policy's latest decision on a model's batch size and on
//! the refusal of late requests.
//!
//! Predictions are means of observed times. Admission control therefore refuses requests that are more
//! likely to be late than in time. The [deadline filter](super::deadline) checks each request again
//! when its batch is sent.

use std::time::Duration;

use shadowslice_shared::units::Timestamp;

use super::batcher::BatchLimits;
use super::deadline::DeadlineFilter;
use super::lane::Lane;
use super::messages::RefusalReason;
use super::queue::QueuedRequest;
use super::write_time::WriteTime;
use crate::sharing::AdmissionPolicy;

/// The length of the grace period after an outage, as a multiple of the outage's duration. In the grace
/// period, no request is refused as late.
const FORGIVEN_PER_OUTAGE: u32 = 10;

/// The maximum grace period after an outage.
const MAX_FORGIVEN: Duration = Duration::from_secs(30);

/// The time before the expected end of a batch at which the next batch is sent. It is several times the
/// transfer time to the worker, and a small fraction of a batch's execution time. Requests that arrive
/// after a batch was sent cannot join it, so a longer lead would make batches smaller.
const LEAD: Duration = Duration::from_micros(500);

/// The admission control of one model.
#[derive(Debug)]
pub(super) struct AdmissionControl {
    policy: AdmissionPolicy,
    /// True if the configuration has `on_late: serve`.
    serves_late: bool,
    /// The limits from the model and its configuration.
    model_limits: BatchLimits,
    /// The start of the current outage. In an outage, no lane serves, or the serving lane has stalled.
    outage_since: Option<Timestamp>,
    /// The end of the grace period. Late requests that arrived earlier are not a sign of overload.
    forgiven_before: Timestamp,
    write_time: WriteTime,
}

impl AdmissionControl {
    pub(super) fn new(model_limits: BatchLimits, serves_late: bool) -> Self {
        let (policy, forgiven_before) = (AdmissionPolicy::accept_all(u32::MAX), Timestamp::default());
        Self {
            policy,
            serves_late,
            model_limits,
            outage_since: None,
            forgiven_before,
            write_time: WriteTime::default(),
        }
    }

    pub(super) fn set_policy(&mut self, policy: AdmissionPolicy) {
        self.policy = policy;
    }

    pub(super) fn configure(&mut self, max_delay: Duration, serves_late: bool) {
        self.model_limits.max_delay = max_delay;
        self.serves_late = serves_late;
    }

    /// Records how long it took to write an answer to the client's socket.
    pub(super) fn record_write_time(&mut self, took: Duration, slo: Duration) {
        self.write_time.observe(took, slo);
    }

    pub(super) fn set_model_limits(&mut self, max_rows: u32, max_requests: usize) {
        self.model_limits = BatchLimits { max_rows, max_requests, ..self.model_limits };
    }

    pub(super) fn limits(&self) -> BatchLimits {
        // The policy's limit cannot apply to a model without a batch axis, for which `max_rows` is 0.
        BatchLimits {
            max_rows: self.model_limits.max_rows.min(self.policy.max_batch.max(1)),
            ..self.model_limits
        }
    }

    /// Returns why a request that arrives now is refused, if it cannot be answered in time. `lane` is the
    /// serving lane. During an outage, only a request whose client no longer waits is refused, because the
    /// load is not the cause of the delay.
    pub(super) fn refusal<K, T>(
        &self,
        request: &QueuedRequest<K, T>,
        queued_rows: impl FnOnce() -> u64,
        lane: Option<&Lane<K, T>>,
        now: Timestamp,
    ) -> Option<RefusalReason> {
        if request.expires.is_some_and(|expires| expires <= now) {
            return Some(RefusalReason::Expires);
        }
        let refuses_late = self.refuses_late() && now >= self.forgiven_before;
        let may = self.outage_since.is_none() && (refuses_late || request.expires.is_some());
        let answered = self.predict_answer(request, queued_rows(), lane.filter(|_| may)?, now)?;
        if request.expires.is_some_and(|expires| answered > expires) {
            Some(RefusalReason::Expires)
        } else {
            (refuses_late && answered > request.deadline).then_some(RefusalReason::TooLate)
        }
    }

    /// Returns true if a request would be answered after its client stops waiting, even if the next batch
    /// contained nothing else. An idle lane gets every request, as with the
    /// [deadline filter](super::deadline).
    pub(super) fn expires_first<K, T>(
        &self,
        request: &QueuedRequest<K, T>,
        lane: &Lane<K, T>,
        now: Timestamp,
    ) -> bool {
        let ends_after = |expires| self.predict_end(u64::from(request.rows), lane, now) > expires;
        !lane.is_idle() && self.outage_since.is_none() && request.expires.is_some_and(ends_after)
    }

    /// Predicts when the client of a request that arrives now will have the answer. The prediction
    /// includes the full batches ahead of the request, the request's own batch, and the write of the
    /// answer to the client's socket.
    ///
    /// Returns `None` if no rows are ahead of the request. Such a request is never refused. If it were,
    /// a prediction that makes every request late would never be corrected.
    fn predict_answer<K, T>(
        &self,
        request: &QueuedRequest<K, T>,
        queued_rows: u64,
        lane: &Lane<K, T>,
        now: Timestamp,
    ) -> Option<Timestamp> {
        if queued_rows == 0 && lane.is_idle() {
            return None;
        }
        Some(self.predict_end(queued_rows + u64::from(request.rows), lane, now))
    }

    /// Predicts when the clients will have the answers to all batches of the lane and to `rows` more rows.
    pub(super) fn predict_end<K, T>(&self, rows: u64, lane: &Lane<K, T>, now: Timestamp) -> Timestamp {
        let ahead = rows.saturating_sub(1);
        let max = lane.limits(self.limits()).max_rows.max(1);
        let (full, part) = (ahead / u64::from(max), ahead % u64::from(max));
        let own = u32::try_from(part).map_or(max, |part| part + 1);
        let mut answered = lane.free_at(now) + lane.time(own);
        if full > 0 {
            let full = u32::try_from(full).unwrap_or(u32::MAX);
            answered = answered + lane.time(max).saturating_mul(full);
        }
        answered + self.write_time.mean()
    }

    /// Returns true if the model refuses requests that cannot be answered in time. If this is false,
    /// the model can refuse requests only under overload, after their deadline has passed.
    pub(super) fn refuses_late(&self) -> bool {
        self.policy.refuse_late && !self.serves_late
    }

    /// Returns true if batches pause for batches of other models.
    pub(super) fn pauses(&self) -> bool {
        self.policy.pause
    }

    /// Returns the filter for the next batch of a lane. Returns `None` if no request is refused as
    /// late.
    pub(super) fn deadline_filter<'l, K, T>(
        &self,
        lane: &'l Lane<K, T>,
        now: Timestamp,
    ) -> Option<DeadlineFilter<'l>> {
        let refuses = self.refuses_late() && self.outage_since.is_none();
        refuses.then(|| DeadlineFilter {
            free_at: lane.free_at(now),
            idle: lane.is_idle(),
            forgiven_before: self.forgiven_before,
            write_time: self.write_time.mean(),
            predictor: &lane.predictor,
        })
    }

    /// Returns the time until which the next batch waits although a slot is free. Returns `None` if the
    /// batch may be sent now.
    pub(super) fn hold_until<K, T>(&self, lane: &Lane<K, T>, now: Timestamp) -> Option<Timestamp> {
        // A request that only opens a stream shares its batch with no other request.
        if lane.is_idle() || lane.streams.advance_together() {
            return None;
        }
        Some(lane.free_at(now) - LEAD).filter(|&moment| moment > now)
    }

    /// Updates the state of the outage. `serves` is true if a lane serves and has not stalled.
    pub(super) fn update_outage(&mut self, serves: bool, now: Timestamp) {
        match (self.outage_since, serves) {
            (None, false) => self.outage_since = Some(now),
            (Some(since), true) => {
                let forgiven_before = now.since(since).saturating_mul(FORGIVEN_PER_OUTAGE).min(MAX_FORGIVEN);
                self.forgiven_before = self.forgiven_before.max(now + forgiven_before);
                self.outage_since = None;
            }
            _ => {}
        }
    }

    /// Returns true in the grace period after an outage.
    pub(super) fn forgives(&self, now: Timestamp) -> bool {
        now < self.forgiven_before
    }

    /// Records that requests were put back into the queue. These requests run first, and delay all
    /// other queued requests.
    pub(super) fn put_back(&mut self, now: Timestamp) {
        self.forgiven_before = self.forgiven_before.max(now);
    }

    /// Records that the queue is empty. From now on, no request is delayed by an earlier outage.
    pub(super) fn on_queue_emptied(&mut self, now: Timestamp) {
        self.forgiven_before = self.forgiven_before.min(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MODEL_LIMITS: BatchLimits =
        BatchLimits { max_rows: 16, max_requests: 9, max_delay: Duration::from_millis(2) };

    fn at(seconds: u64) -> Timestamp {
        Timestamp::after_origin(Duration::from_secs(seconds))
    }

    #[test]
    fn the_door_moves_within_what_the_configuration_and_the_model_allow() {
        let mut admission = AdmissionControl::new(MODEL_LIMITS, false);
        assert_eq!(admission.limits(), MODEL_LIMITS);
        for (max_batch, rows) in [(0, 1), (1, 1), (4, 4), (16, 16), (u32::MAX, 16)] {
            admission.set_policy(AdmissionPolicy::accept_all(max_batch));
            assert_eq!(admission.limits(), BatchLimits { max_rows: rows, ..MODEL_LIMITS });
        }
        admission.set_model_limits(0, 1);
        admission.set_policy(AdmissionPolicy::accept_all(4));
        assert_eq!(admission.limits().max_rows, 0, "the model has no batch axis");
    }

    #[test]
    fn an_outage_is_forgiven_in_proportion_or_until_the_queue_was_empty() {
        let mut admission = AdmissionControl::new(MODEL_LIMITS, false);
        assert_eq!(admission.forgiven_before, at(0));
        admission.update_outage(false, at(10));
        admission.update_outage(false, at(11));
        admission.update_outage(true, at(12));
        admission.update_outage(true, at(13));
        assert_eq!(admission.forgiven_before, at(32));
        admission.update_outage(false, at(100));
        admission.update_outage(true, at(500));
        assert_eq!(admission.forgiven_before, at(530));
    }

    #[test]
    fn whom_a_hand_over_or_a_death_delayed_is_forgiven_and_who_comes_after_an_empty_queue_is_not() {
        let mut admission = AdmissionControl::new(MODEL_LIMITS, false);
        admission.put_back(at(5));
        assert_eq!(admission.forgiven_before, at(5));
        admission.update_outage(false, at(6));
        admission.update_outage(true, at(8));
        assert_eq!(admission.forgiven_before, at(28));
        admission.on_queue_emptied(at(10));
        assert_eq!(admission.forgiven_before, at(10));
    }
}
