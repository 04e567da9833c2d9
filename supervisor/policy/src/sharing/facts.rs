//! What a policy is told.

use std::time::Duration;

use shadowslice_shared::profile::Profile;
use shadowslice_shared::units::{Moment, Sms};

/// What is known of a model beforehand. When any of it changes, by a reload say, the policy begins
/// anew on the model's GPU.
#[derive(Debug, Clone, PartialEq)]
pub struct Terms {
    /// Its name, for reports.
    pub name: String,
    /// The index of its GPU.
    pub gpu: usize,
    /// The share that its configuration starts it with.
    pub initial: Sms,
    /// Whether an operator chose `initial`, rather than left it to be divided.
    pub initial_given: bool,
    /// The shares that it may have, ascending: not all numbers of SMs can be had.
    pub shares: Vec<Sms>,
    /// The latency that it promises, from arrival to answer.
    pub slo: Duration,
    /// How many percent of its requests must keep the SLO; above 0, at most 100.
    pub percentile: f64,
    /// 1 is the highest.
    pub priority: u32,
    /// The largest batch, in rows; at least 1.
    pub max_batch: u32,
    /// What it costs, as far as that is known beforehand.
    pub profile: Option<Profile>,
}

impl Terms {
    /// The least share of so many SMs or more that the model may have, else the largest.
    pub fn within(&self, sms: Sms) -> Sms {
        self.shares.iter().copied().find(|&share| share >= sms).unwrap_or(self.most())
    }

    /// The largest share that it may have.
    pub fn most(&self) -> Sms {
        self.shares.last().copied().unwrap_or(self.initial)
    }

    /// The part of its requests that need not keep the SLO.
    pub(super) fn may_miss(&self) -> f64 {
        1.0 - self.percentile / 100.0
    }
}

/// The state of everything now. Immutable, and possibly stale when a decision is carried out.
#[derive(Debug, Clone, PartialEq)]
pub struct Facts {
    /// Now.
    pub now: Moment,
    /// The SMs of each GPU.
    pub gpus: Vec<Sms>,
    /// The models, in the order of their [`Terms`].
    pub models: Vec<Live>,
}

/// One model as it stands now.
#[derive(Debug, Clone, PartialEq)]
pub struct Live {
    /// The share in force.
    pub share: Sms,
    /// Since when.
    pub since: Moment,
    /// The share that a hand-over under way will bring.
    pub coming: Option<Sms>,
    /// The share of a worker that stands ready: one that was parked, or was kept warm.
    pub ready: Option<Sms>,
    /// Whether its share is held: by an operator, or because its answers are wrong with another
    /// share.
    pub held: bool,
    /// What was seen since the last decision.
    pub seen: Seen,
}

/// What was seen of a model over a span of time.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Seen {
    /// How long.
    pub span: Duration,
    /// Requests that came, refused ones included.
    pub arrived: u64,
    /// Rows of all these requests.
    pub rows: u64,
    /// Requests answered.
    pub answered: u64,
    /// Requests answered within the SLO.
    pub in_time: u64,
    /// Of these, the requests with answers that [leave time for the way](leaves_time_for_the_way).
    pub in_good_time: u64,
    /// Requests turned away.
    pub refused: u64,
    /// Requests that wait now.
    pub queued: usize,
    /// Mean latency of the answers; zero without any.
    pub mean_latency: Duration,
    /// 99th percentile of the answers' latency; zero without any.
    pub p99_latency: Duration,
    /// The part of the span in which a batch executed, 0 to 1.
    pub busy: f64,
    /// Batches by their size. All executed at the share in force, beside the neighbours of that
    /// time.
    pub executed: Vec<Executed>,
}

impl Seen {
    /// Requests that missed the SLO, as their clients see it: answered too late for them, or refused.
    pub fn missed(&self) -> u64 {
        self.answered.saturating_sub(self.in_good_time) + self.refused
    }
}

/// The part of the SLO that is left for a request's way from its client and its answer's way back,
/// which no server sees. Measured on H100s and an H200: 0.4 to 0.9 ms of SLOs of 4 to 8 ms, for
/// clients in Rust and in Python.
const WAY: f64 = 0.1;

/// Whether an answer is early enough for its client to have it within the SLO.
pub fn leaves_time_for_the_way(latency: Duration, slo: Duration) -> bool {
    latency <= slo.mul_f64(1.0 - WAY)
}

/// Batches of one size.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Executed {
    /// Rows of the batch.
    pub rows: u32,
    /// How many.
    pub count: u64,
    /// Their mean execution time.
    pub mean: Duration,
}
