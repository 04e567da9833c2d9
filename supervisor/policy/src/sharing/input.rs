//! The input of a sharing policy.

use std::time::Duration;

use shadowslice_shared::groups::Groups;
use shadowslice_shared::profile::{Execution, Profile};
use shadowslice_shared::units::{Sms, Timestamp};

/// The configuration of a model. If any of it changes, for example by a reload, the policy starts
/// without memory on the model's GPU.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelSpec {
    /// The model's name.
    pub name: String,
    /// The index of the model's GPU.
    pub gpu: usize,
    /// The initial share.
    pub initial: Sms,
    /// True if an operator chose `initial`; otherwise the share is computed.
    pub initial_given: bool,
    /// The shares that the model may have, ascending. Not every number of SMs is possible.
    pub shares: Vec<Sms>,
    /// The longest time from a request's first byte to its answer's last byte.
    pub slo: Duration,
    /// The percentage of requests that must meet the SLO; above 0, at most 100.
    pub percentile: f64,
    /// The priority; 1 is the highest.
    pub priority: u32,
    /// The largest batch, in rows; at least 1.
    pub max_batch: u32,
    /// The model's profile, if it has one.
    pub profile: Option<Profile>,
}

impl ModelSpec {
    /// Returns the smallest share that the model may have with at least `sms` SMs, or else its
    /// largest share.
    pub fn share_for(&self, sms: Sms) -> Sms {
        self.shares.iter().copied().find(|&share| share >= sms).unwrap_or(self.max_share())
    }

    /// Returns the largest share that the model may have.
    pub fn max_share(&self) -> Sms {
        self.shares.last().copied().unwrap_or(self.initial)
    }

    /// Returns the part of the requests that may miss the SLO, 0 to 1.
    pub(super) fn allowed_miss_rate(&self) -> f64 {
        1.0 - self.percentile / 100.0
    }
}

/// The state of all GPUs and models at one time. It may be stale when the decision is carried out.
#[derive(Debug, Clone, PartialEq)]
pub struct PolicyInput {
    /// The time of the input.
    pub now: Timestamp,
    /// The SMs of each GPU.
    pub gpus: Vec<Sms>,
    /// The models, in the order of their [`ModelSpec`]s.
    pub models: Vec<ModelSnapshot>,
}

/// The state of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelSnapshot {
    /// The share in force.
    pub share: Sms,
    /// The time since which `share` is in force.
    pub share_since: Timestamp,
    /// The share that a change under way will bring.
    pub pending_share: Option<Sms>,
    /// The share of a worker that can take over at once: a parked one or a standby.
    pub standby_share: Option<Sms>,
    /// The groups on which batches run, if the share is a partition inside the worker.
    pub groups: Option<Groups>,
    /// The times of batches on each number of SMs, as workers measured them before they served;
    /// `None` if unknown.
    pub execution: Option<Execution>,
    /// True if the share must not change: an operator holds it, or the model's answers are wrong
    /// with another share.
    pub held: bool,
    /// The observation of the last interval.
    pub observation: Observation,
}

/// The requests and batches of a model in one interval.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Observation {
    /// The length of the interval.
    pub span: Duration,
    /// The number of requests that arrived, including refused ones.
    pub arrived: u64,
    /// The number of rows of these requests.
    pub rows: u64,
    /// The number of requests that were answered.
    pub answered: u64,
    /// The number of answers within the SLO.
    pub in_time: u64,
    /// The number of answers that also [leave time for delivery](leaves_time_for_delivery).
    pub in_time_at_client: u64,
    /// The number of refused requests.
    pub refused: u64,
    /// The number of queued requests at the end of the interval.
    pub queued: usize,
    /// The mean time from a request's first byte to its answer's last byte; zero without answers.
    pub mean_latency: Duration,
    /// The 99th percentile of these times; zero without answers.
    pub p99_latency: Duration,
    /// The part of the interval in which a batch executed, 0 to 1.
    pub busy: f64,
    /// The executed batches by size, all at the share in force and beside the neighbours of that
    /// time.
    pub batches: Vec<BatchStats>,
}

impl Observation {
    /// Returns the number of requests that missed the SLO from the client's view: answered too late
    /// for the client, or refused.
    pub fn missed(&self) -> u64 {
        self.answered.saturating_sub(self.in_time_at_client) + self.refused
    }
}

/// The part of the SLO that is kept for what no server measures: the client, the network and the
/// kernel's buffers. On H100s and an H200 this took 0.4 to 0.9 ms of SLOs of 4 to 8 ms, a tenth,
/// including the writing of answers. The latency now includes writing, so half is kept.
const DELIVERY_PART: f64 = 0.05;

/// Returns true if the client has the answer within the SLO.
pub fn leaves_time_for_delivery(latency: Duration, slo: Duration) -> bool {
    latency <= slo.mul_f64(1.0 - DELIVERY_PART)
}

/// The executed batches of one size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BatchStats {
    /// The number of rows of each batch.
    pub rows: u32,
    /// The number of batches.
    pub count: u64,
    /// The mean time of a batch.
    pub mean: Duration,
}
