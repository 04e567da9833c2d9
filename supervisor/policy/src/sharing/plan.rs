//! What a policy answers.

use std::time::Duration;

use shadowslice_shared::units::{Moment, Sms};

/// A policy with a memory, such as `adaptive`, may decide otherwise when it is asked again on the
/// same facts.
#[derive(Debug, Clone, PartialEq, Default)]
#[must_use = "a decision that is not carried out has changed nothing"]
pub struct Decision {
    /// In this order: shares that become smaller come first. The planner may leave a change out,
    /// and changes nothing else.
    pub changes: Vec<Change>,
    /// In the models' order.
    pub doors: Vec<Door>,
    /// In the models' order.
    pub report: Vec<Verdict>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// An index.
    pub model: usize,
    pub from: Sms,
    pub to: Sms,
    /// A standing worker takes over at once.
    pub at_once: bool,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Door {
    /// In rows.
    pub max_batch: u32,
    /// A request that cannot be answered in time is refused.
    pub refuse_late: bool,
}

impl Door {
    pub const fn open(max_batch: u32) -> Self {
        Self { max_batch, refuse_late: false }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Verdict {
    pub from: Sms,
    /// The share that the model should have; the same where it is right.
    pub to: Sms,
    /// `None` if there is no change to make, or it is made now.
    pub waiting: Option<Waiting>,
    pub why: Why,
}

impl Verdict {
    pub fn changes(&self) -> bool {
        self.from != self.to && self.waiting.is_none()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waiting {
    Handover,
    Held,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Why {
    Divided,
    Met(Missed),
    MakesRoom {
        /// The index of the model that gets room.
        sake: usize,
        /// What that model missed before.
        before: f64,
        now: Missed,
    },
    /// The model misses, and its neighbours make room for it, or will in their turn.
    Short {
        missed: Missed,
        steps: usize,
    },
    /// The model misses, and no other model can make room for it, or that did not help.
    Helpless {
        missed: Missed,
        until: Moment,
    },
    /// The model misses, but not because of the time that its batches take.
    NotItsBatches {
        missed: Missed,
        /// What two of the model's longest batches take.
        two_batches: Duration,
    },
}

/// Over the last second, or over the last 10 s if few requests ended in that second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Missed {
    /// Of the requests that ended, 0 to 1.
    pub part: f64,
    /// The part that may miss, by the model's percentile.
    pub may: f64,
}
