//! The counts of a model's requests, and the definition of an answer in time.

use std::ops::Sub;
use std::time::Duration;

use super::DELIVERY_PART;

/// The shortest period over which a rate is calculated.
const SHORTEST: Duration = Duration::from_secs(1);

/// Returns true if an answer was in time.
///
/// An answer is in time if its last byte was written within the SLO's latency, counted from the
/// request's first byte. Every count, rate and attainment uses this definition.
pub fn is_in_time(latency: Duration, slo: Duration) -> bool {
    latency <= slo
}

/// The way in which a request ended without an answer that the client received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unanswered {
    /// The request was refused because of the model's load.
    Overloaded,
    /// The request was refused for another reason, for example because the model is not ready.
    Refused,
    /// The request's own timeout expired. The policy counts this request as a miss, so that a client
    /// with a timeout shorter than the SLO cannot hide misses.
    TimedOut,
    /// The model failed to answer the request.
    Failed,
    /// The client cancelled the request after this time.
    Cancelled(Duration),
}

/// The figures of a model's requests since the start. They never decrease, so the difference of two
/// values gives the figures of a period.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct TrafficCounts {
    /// The number of requests that the scheduler accepted or refused.
    pub arrived: u64,
    /// The total number of rows of these requests.
    pub rows: u64,
    /// The number of requests that were answered.
    pub answered: u64,
    /// The number of answers [in time](is_in_time).
    pub in_time: u64,
    /// The number of answers in time that also left time for delivery.
    pub in_time_at_client: u64,
    /// The number of refused requests.
    pub refused: u64,
    /// The number of requests that the model failed to answer, or that timed out.
    pub failed: u64,
    /// The number of requests that clients cancelled.
    pub cancelled: u64,
    /// The number of requests that clients cancelled after the SLO had passed.
    pub cancelled_late: u64,
    /// The number of requests without an answer that count against the model's share: they were refused
    /// because of the load, timed out, or were cancelled after the SLO had passed.
    pub unserved: u64,
    /// The sum of the latencies of all answers.
    pub latency: Duration,
    /// The sum of the latencies of all answers, each divided by the SLO of its time.
    pub slo_parts: f64,
    /// The time in which a batch executed.
    pub busy: Duration,
}

impl TrafficCounts {
    /// Counts the answer to a request.
    pub(super) fn add_answer(&mut self, latency: Duration, slo: Duration) {
        self.answered += 1;
        self.in_time += u64::from(is_in_time(latency, slo));
        self.in_time_at_client += u64::from(is_in_time(latency, slo.mul_f64(1.0 - DELIVERY_PART)));
        self.latency = self.latency.saturating_add(latency);
        self.slo_parts += latency.as_secs_f64() / slo.as_secs_f64();
    }

    /// Counts a request without an answer.
    pub(super) fn add_unanswered(&mut self, how: Unanswered, slo: Duration) {
        let (ended, is_unserved) = match how {
            Unanswered::Overloaded => (&mut self.refused, true),
            Unanswered::Refused => (&mut self.refused, false),
            Unanswered::TimedOut => (&mut self.failed, true),
            Unanswered::Failed => (&mut self.failed, false),
            Unanswered::Cancelled(waited) => {
                let late = waited >= slo;
                self.cancelled_late += u64::from(late);
                (&mut self.cancelled, late)
            }
        };
        *ended += 1;
        self.unserved += u64::from(is_unserved);
    }

    /// Returns the number of requests that ended.
    pub fn ended(&self) -> u64 {
        self.answered + self.refused + self.failed + self.cancelled
    }

    /// Returns the number of requests that should have been answered in time. A request does not count
    /// if its client cancelled it before the SLO had passed, or if it was invalid.
    pub fn offered(&self) -> u64 {
        self.answered + self.refused + self.failed + self.cancelled_late
    }

    /// Returns the fraction of the offered requests that were answered in time. Returns `None` if no
    /// requests were offered.
    pub fn attainment(&self) -> Option<f64> {
        (self.offered() > 0).then(|| self.in_time as f64 / self.offered() as f64)
    }
}

impl Sub for TrafficCounts {
    type Output = Self;

    /// Returns the figures of the period between `earlier` and `self`.
    fn sub(self, earlier: Self) -> Self {
        Self {
            arrived: self.arrived - earlier.arrived,
            rows: self.rows - earlier.rows,
            answered: self.answered - earlier.answered,
            in_time: self.in_time - earlier.in_time,
            in_time_at_client: self.in_time_at_client - earlier.in_time_at_client,
            refused: self.refused - earlier.refused,
            failed: self.failed - earlier.failed,
            cancelled: self.cancelled - earlier.cancelled,
            cancelled_late: self.cancelled_late - earlier.cancelled_late,
            unserved: self.unserved - earlier.unserved,
            latency: self.latency.saturating_sub(earlier.latency),
            slo_parts: self.slo_parts - earlier.slo_parts,
            busy: self.busy - earlier.busy,
        }
    }
}

/// The figures of a model's requests in a period.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct TrafficWindow {
    /// The length of the period.
    pub span: Duration,
    /// The figures of the period.
    pub counts: TrafficCounts,
}

impl TrafficWindow {
    /// Returns the number of events per second, for a number of events in this period.
    pub fn rate(&self, count: u64) -> f64 {
        count as f64 / self.span.max(SHORTEST).as_secs_f64()
    }

    /// Returns the fraction of the period in which a batch executed, 0 to 1.
    pub fn busy(&self) -> f64 {
        (self.counts.busy.as_secs_f64() / self.span.as_secs_f64().max(1e-9)).clamp(0.0, 1.0)
    }
}
