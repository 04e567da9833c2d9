//! What a policy answers.

use std::time::Duration;

use shadowslice_shared::units::{Moment, Sms};

/// All that is to happen, and why. Deciding again on the same facts after carrying it out changes nothing.
#[derive(Debug, Clone, PartialEq, Default)]
#[must_use = "a decision that is not carried out has changed nothing"]
pub struct Decision {
    /// The shares to change; `None` if none is.
    pub plan: Option<Plan>,
    /// How each model batches and whom it lets in from now on, in the models' order.
    pub doors: Vec<Door>,
    /// For each model: why.
    pub report: Vec<Verdict>,
}

/// Which shares change, in this order: those that make room come before those that take it, unless
/// nothing is lost by the overlap. It leaves its executor no choice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Counts the plans.
    pub epoch: u64,
    /// The changes.
    pub changes: Vec<Change>,
}

/// One hand-over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// The model's index.
    pub model: usize,
    /// The share in force.
    pub from: Sms,
    /// The share to come.
    pub to: Sms,
    /// Whether a standing worker takes over at once.
    pub at_once: bool,
}

/// A model's batching and admission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Door {
    /// The largest batch, in rows.
    pub max_batch: u32,
    /// Whether a request that cannot be answered in time is refused as it comes.
    pub refuse_late: bool,
    /// How long before the batch that executes should end the next one may be sent. Until then
    /// requests wait where they still join a larger batch, or are refused.
    pub lead: Duration,
}

impl Door {
    /// A door that turns nobody away, and a lane that always has its next batch.
    pub const fn open(max_batch: u32) -> Self {
        Self { max_batch, refuse_late: false, lead: Duration::MAX }
    }
}

/// What a policy finds about a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Its share is right.
    Keep,
    /// It needs more.
    Grow {
        /// The share in force.
        from: Sms,
        /// The share to come.
        to: Sms,
        /// What shows it.
        because: Pressure,
    },
    /// Others need what it does not.
    Shrink {
        /// The share in force.
        from: Sms,
        /// The share to come.
        to: Sms,
    },
    /// Another share would be better, but not now.
    Wait {
        /// The share that would be better.
        to: Sms,
        /// What is waited for.
        waiting: Waiting,
    },
}

/// What shows that a model needs more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pressure {
    /// Answers come too late.
    Latency,
    /// More comes than can be answered.
    Throughput,
    /// More will come than can be answered, by the forecast.
    Forecast,
    /// Its policy gives the share without asking for more.
    Policy,
}

/// What a change waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waiting {
    /// The last change is too recent.
    Dwell {
        /// When it no longer is.
        until: Moment,
    },
    /// A hand-over of this model is under way.
    Handover,
    /// It would cost more than it brings.
    TooDear,
    /// Too little was seen yet.
    Observations,
    /// People hold the share.
    Held,
}
