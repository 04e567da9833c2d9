//! What a policy answers.

use std::time::Duration;

use shadowslice_shared::units::{Moment, Sms};

/// All that is to happen, and why. A policy with a memory, such as `adaptive`, may decide otherwise
/// when it is asked again on the same facts.
#[derive(Debug, Clone, PartialEq, Default)]
#[must_use = "a decision that is not carried out has changed nothing"]
pub struct Decision {
    /// The shares to change, in this order: those that become smaller come first. The planner may
    /// leave a change out, and changes nothing else.
    pub changes: Vec<Change>,
    /// How each model batches and which requests it lets in from now on, in the models' order.
    pub doors: Vec<Door>,
    /// For each model, why it has its share.
    pub report: Vec<Verdict>,
}

/// One change of a share.
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
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Door {
    /// The largest batch, in rows.
    pub max_batch: u32,
    /// Whether a request that cannot be answered in time is refused.
    pub refuse_late: bool,
}

impl Door {
    /// A door that lets all requests in.
    pub const fn open(max_batch: u32) -> Self {
        Self { max_batch, refuse_late: false }
    }
}

/// What a policy finds about a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Verdict {
    /// The share in force.
    pub from: Sms,
    /// The share that the model should have; the same where it is right.
    pub to: Sms,
    /// What a change waits for; `None` if there is no change to make, or it is made now.
    pub waiting: Option<Waiting>,
    /// Why the model should have that share.
    pub why: Why,
}

impl Verdict {
    /// Whether the share changes now.
    pub fn changes(&self) -> bool {
        self.from != self.to && self.waiting.is_none()
    }
}

/// What a change waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waiting {
    /// A hand-over of this model is under way.
    Handover,
    /// An operator holds the share.
    Held,
}

/// Why a model has its share.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Why {
    /// That is how its policy divides the GPU, whatever happens to its requests.
    Divided,
    /// No more of its requests miss than may.
    Met(Missed),
    /// It makes room for another model.
    MakesRoom {
        /// That model's index.
        sake: usize,
        /// What that model missed before.
        before: f64,
        /// What it misses now.
        now: Missed,
    },
    /// It misses, and its neighbours make room for it, or will in their turn.
    Short {
        /// What it misses.
        missed: Missed,
        /// How many steps were made for its sake.
        steps: usize,
    },
    /// It misses, and no other model can make room for it, or that did not help.
    Helpless {
        /// What it misses.
        missed: Missed,
        /// When it is tried again.
        until: Moment,
    },
    /// It misses, but not because of the time that its batches take.
    NotItsBatches {
        /// What it misses.
        missed: Missed,
        /// What two of its longest batches take.
        two_batches: Duration,
    },
}

/// Requests that missed over the last second, or over the last 10 s if few ended in that second, as
/// a part of those that ended.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Missed {
    /// That part, 0 to 1.
    pub part: f64,
    /// The part that may miss, by the model's percentile.
    pub may: f64,
}
