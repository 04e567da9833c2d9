//! The input of a sharing policy.

use std::time::Duration;

use shadowslice_shared::groups::Groups;
use shadowslice_shared::profile::{Execution, Profile};
use shadowslice_shared::units::{Sms, Timestamp};

/// The configuration of a model. If a model's spec changes, for example by a reload, the policy
/// discards its state for the model's GPU.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelSpec {
    /// The name of the model.
    pub name: String,
    /// The index of the model's GPU.
    pub gpu: usize,
    /// The initial share, in SMs.
    pub initial: Sms,
    /// True if an operator chose `initial`. This is false if the supervisor computed the share.
    pub initial_given: bool,
    /// The possible shares of the model, ascending. Not every number of SMs is a possible share.
    pub shares: Vec<Sms>,
    /// The SLO: the maximum time from the first byte of a request to the last byte of its answer.
    pub slo: Duration,
    /// The percentage of requests that must meet the SLO, above 0 and at most 100.
    pub percentile: f64,
    /// The priority. 1 is the highest.
    pub priority: u32,
    /// The maximum batch size in rows, at least 1.
    pub max_batch: u32,
    /// The model's profile, if it has one.
    pub profile: Option<Profile>,
}

impl ModelSpec {
    /// Returns the smallest possible share with at least `sms` SMs. If no possible share is that large,
    /// returns the largest possible share.
    pub fn share_for(&self, sms: Sms) -> Sms {
        self.shares.iter().copied().find(|&share| share >= sms).unwrap_or(self.max_share())
    }

    /// Returns the largest possible share.
    pub fn max_share(&self) -> Sms {
        self.shares.last().copied().unwrap_or(self.initial)
    }

    /// Returns the fraction of the requests that are allowed to miss the SLO, 0 to 1.
    pub(super) fn allowed_miss_rate(&self) -> f64 {
        1.0 - self.percentile / 100.0
    }
}

/// The state of all GPUs and models at one point in time. It may be outdated by the time the decision
/// is applied.
#[derive(Debug, Clone, PartialEq)]
pub struct PolicyInput {
    /// The time of this state.
    pub now: Timestamp,
    /// The number of SMs of each GPU.
    pub gpus: Vec<Sms>,
    /// The models, in the order of their [`ModelSpec`]s.
    pub models: Vec<ModelSnapshot>,
}

/// The state of one model.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelSnapshot {
    /// The share in force, in SMs.
    pub share: Sms,
    /// The time at which `share` came into force.
    pub share_since: Timestamp,
    /// The share after the change in progress, or `None` if no change is in progress.
    pub pending_share: Option<Sms>,
    /// The share of a worker that can take over immediately, either a parked worker or a standby.
    pub standby_share: Option<Sms>,
    /// The groups on which batches run. This is `None` if the share is not a partition inside the
    /// worker.
    pub groups: Option<Groups>,
    /// The times of batches by number of SMs, which workers measured before they served. This is `None`
    /// if the times are unknown.
    pub execution: Option<Execution>,
    /// True if the share must not change. Either an operator holds it, or the model's answers are wrong
    /// at other shares.
    pub held: bool,
    /// True if the model has long batches that can pause, and the operator permits it.
    pub can_pause: bool,
    /// The observation of the last interval.
    pub observation: Observation,
}

/// The statistics of a model's requests and batches in one interval.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Observation {
    /// The length of the interval.
    pub span: Duration,
    /// The number of requests that arrived, including refused requests.
    pub arrived: u64,
    /// The total number of rows of the requests that arrived.
    pub rows: u64,
    /// The number of requests that were answered.
    pub answered: u64,
    /// The number of answers [in time](crate::scheduler::is_in_time) that also left time for delivery,
    /// so that they reached the client in time.
    pub in_time_at_client: u64,
    /// The fraction of the offered requests that were answered in time. `None` if no requests were
    /// offered.
    pub attainment: Option<f64>,
    /// The number of requests without an answer that count against the model's share. They were refused
    /// because of the load, timed out, or were cancelled after the SLO had passed.
    pub refused: u64,
    /// The number of requests in the queue at the end of the interval.
    pub queued: usize,
    /// The mean time from the first byte of a request to the last byte of its answer. It is zero if
    /// there were no answers.
    pub mean_latency: Duration,
    /// The 99th percentile of the time from the first byte of a request to the last byte of its answer.
    /// It is zero if there were no answers.
    pub p99_latency: Duration,
    /// The fraction of the interval during which a batch executed, 0 to 1.
    pub busy: f64,
    /// The executed batches by size. All of them ran at the share in force, and under the contention of
    /// that interval.
    pub batches: Vec<BatchStats>,
}

impl Observation {
    /// Returns these observations of requests with those of the gaps between the answers of streams. Each
    /// gap counts like a request whose SLO is that of the next answer. The latencies are those of the
    /// gaps, because nearly all answers of a stream come after the first one.
    pub(crate) fn with_gaps(self, gaps: &Self) -> Self {
        let offered = |seen: &Self| seen.attainment.map_or(0, |_| seen.answered + seen.refused);
        let in_time = |seen: &Self| seen.attainment.unwrap_or(0.0) * offered(seen) as f64;
        let all = offered(&self) + offered(gaps);
        let attainment = (all > 0).then(|| (in_time(&self) + in_time(gaps)) / all as f64);
        let latencies = if gaps.answered > 0 { gaps } else { &self };
        let (mean_latency, p99_latency) = (latencies.mean_latency, latencies.p99_latency);
        Self {
            arrived: self.arrived + gaps.arrived,
            rows: self.rows + gaps.rows,
            answered: self.answered + gaps.answered,
            in_time_at_client: self.in_time_at_client + gaps.in_time_at_client,
            attainment,
            mean_latency,
            p99_latency,
            ..self
        }
    }

    /// Returns the number of requests that missed the SLO from the client's point of view. These
    /// requests were refused, or answered too late to reach the client in time.
    pub fn missed(&self) -> u64 {
        self.answered.saturating_sub(self.in_time_at_client) + self.refused
    }

    /// Returns the number of requests that arrived per second.
    pub fn arrival_rate(&self) -> f64 {
        let seconds = self.span.as_secs_f64();
        if seconds > 0.0 { self.arrived as f64 / seconds } else { 0.0 }
    }
}

/// The statistics of executed batches of one size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BatchStats {
    /// The number of rows of each batch.
    pub rows: u32,
    /// The number of batches.
    pub count: u64,
    /// The mean execution time of a batch.
    pub mean: Duration,
}
