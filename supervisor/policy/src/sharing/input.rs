//! What a policy is told.

use std::time::Duration;

use shadowslice_shared::groups::Groups;
use shadowslice_shared::profile::{Execution, Profile};
use shadowslice_shared::units::{Sms, Timestamp};

/// Known beforehand. When any of it changes, by a reload say, the policy begins anew on the model's
/// GPU.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelSpec {
    pub name: String,
    /// An index.
    pub gpu: usize,
    pub initial: Sms,
    /// An operator chose `initial`, rather than left it to be divided.
    pub initial_given: bool,
    /// Ascending: not all numbers of SMs can be had.
    pub shares: Vec<Sms>,
    /// The most time from a request's first byte to its answer's last byte.
    pub slo: Duration,
    /// How many percent of the requests must keep the SLO; above 0, at most 100.
    pub percentile: f64,
    /// 1 is the highest.
    pub priority: u32,
    /// In rows; at least 1.
    pub max_batch: u32,
    pub profile: Option<Profile>,
}

impl ModelSpec {
    /// The least share of so many SMs or more that the model may have, else the largest.
    pub fn share_for(&self, sms: Sms) -> Sms {
        self.shares.iter().copied().find(|&share| share >= sms).unwrap_or(self.max_share())
    }

    pub fn max_share(&self) -> Sms {
        self.shares.last().copied().unwrap_or(self.initial)
    }

    /// The part of the requests that need not keep the SLO.
    pub(super) fn allowed_miss_rate(&self) -> f64 {
        1.0 - self.percentile / 100.0
    }
}

/// Immutable, and possibly stale when a decision is carried out.
#[derive(Debug, Clone, PartialEq)]
pub struct PolicyInput {
    pub now: Timestamp,
    pub gpus: Vec<Sms>,
    /// In the order of their [`ModelSpec`].
    pub models: Vec<ModelSnapshot>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct ModelSnapshot {
    pub share: Sms,
    /// Since when `share` is in force.
    pub share_since: Timestamp,
    /// The share that a hand-over under way will bring.
    pub pending_share: Option<Sms>,
    /// The share of a worker that stands ready: one that was parked, or was kept warm.
    pub standby_share: Option<Sms>,
    /// The groups on which batches run, where the share is a partition inside the worker.
    pub groups: Option<Groups>,
    /// How long batches take on each number of SMs, as workers measured it before they served;
    /// `None` if unknown.
    pub execution: Option<Execution>,
    /// By an operator, or because the model's answers are wrong with another share.
    pub held: bool,
    pub observation: Observation,
}

#[derive(Debug, Clone, PartialEq, Default)]
pub struct Observation {
    pub span: Duration,
    /// Refused requests included.
    pub arrived: u64,
    /// Of all these requests.
    pub rows: u64,
    pub answered: u64,
    pub in_time: u64,
    /// Of these, the requests with answers that [leave time for the way](leaves_time_for_delivery).
    pub in_time_at_client: u64,
    pub refused: u64,
    pub queued: usize,
    /// The mean time from a request's first byte to its answer's last byte. Zero without answers.
    pub mean_latency: Duration,
    /// The 99th percentile of the same times. Zero without answers.
    pub p99_latency: Duration,
    /// The part of the span in which a batch executed, 0 to 1.
    pub busy: f64,
    /// By size, all at the share in force, beside the neighbours of that time.
    pub batches: Vec<BatchStats>,
}

impl Observation {
    /// Requests that missed the SLO, as their clients see it: answered too late for them, or
    /// refused.
    pub fn missed(&self) -> u64 {
        self.answered.saturating_sub(self.in_time_at_client) + self.refused
    }
}

/// The part of the SLO that is left for the parts that no server sees: the client, the network, and
/// the kernel's buffers. On H100s and an H200 they took 0.4 to 0.9 ms of SLOs of 4 to 8 ms, a tenth,
/// when the writing of answers was one of them. The latency includes writing now, so half is left.
const WAY: f64 = 0.05;

/// Whether a client has the answer within the SLO.
pub fn leaves_time_for_delivery(latency: Duration, slo: Duration) -> bool {
    latency <= slo.mul_f64(1.0 - WAY)
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BatchStats {
    pub rows: u32,
    pub count: u64,
    pub mean: Duration,
}
