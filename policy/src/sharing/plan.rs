//! What a policy answers.

use std::time::Duration;

use shadowslice_shared::units::{Moment, Sms};

use crate::pressure::Watch;

/// All that is to happen, and why. Deciding again on the same facts after carrying it out changes nothing.
#[derive(Debug, Clone, PartialEq, Default)]
#[must_use = "a decision that is not carried out has changed nothing"]
pub struct Decision {
    /// The shares to change; `None` if none is.
    pub plan: Option<Plan>,
    /// How each model batches and whom it lets in from now on, in the models' order.
    pub doors: Vec<Door>,
    /// For each model: the share at which a second worker should stand ready, if there is room for one. It is
    /// the one that the model most likely needs next.
    pub standby: Vec<Option<Sms>>,
    /// For each model: why.
    pub report: Vec<Verdict>,
}

/// Which shares change, in this order: those that make room come before those that take it, unless
/// nothing is lost by the overlap. It leaves its executor no choice.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// The changes; never empty.
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
    /// When the load changed that this answers, as far as is known; else when it was decided.
    pub onset: Moment,
}

/// What is done between two decisions for a model under pressure.
#[derive(Debug, Clone, PartialEq)]
#[must_use = "relief that is not carried out has changed nothing"]
pub struct Relief {
    /// The share that it gets.
    pub change: Change,
    /// How each model batches and whom it lets in from then on, in the models' order: what was right beside the share before would
    /// refuse requests that can be answered now, up to the next decision.
    pub doors: Vec<Door>,
}

/// A model's batching and admission.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Door {
    /// The largest batch, in rows.
    pub max_batch: u32,
    /// The part of its requests that is let in, 0 to 1. The others are refused, so that what is more
    /// important has the SMs.
    pub admit: f64,
    /// Whether a request that cannot be answered in time is refused.
    pub refuse_late: bool,
    /// Rows that a batch should have by the time it is sent, for those who ask whether they will be in time.
    pub expected_batch: u32,
    /// How long a batch that is not full waits for more, counted from its oldest arrival.
    pub max_delay: Duration,
    /// When more comes than its share was chosen for.
    pub watch: Watch,
}

impl Door {
    /// A door that turns nobody away.
    pub const fn open(max_batch: u32) -> Self {
        Self {
            max_batch,
            expected_batch: 1,
            admit: 1.0,
            max_delay: Duration::ZERO,
            refuse_late: false,
            watch: Watch::OFF,
        }
    }
}

/// What a policy finds about a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Its share is right.
    Keep,
    /// Its share is right, but there is no room for all of its requests beside higher priorities.
    Crowded {
        /// How many percent of them are let in.
        percent: u32,
    },
    /// Its share is right, but even with the whole GPU a single request takes longer than its SLO allows.
    Hopeless,
    /// It should have more.
    Grow {
        /// The share in force.
        from: Sms,
        /// The share to come.
        to: Sms,
    },
    /// It should have less.
    Shrink {
        /// The share in force.
        from: Sms,
        /// The share to come.
        to: Sms,
    },
    /// It should have less, for the sake of others that miss their SLOs.
    Yield {
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

impl Verdict {
    /// The share in force and the one to come, if that is to change now.
    pub(super) fn change(self) -> Option<(Sms, Sms)> {
        match self {
            Self::Grow { from, to } | Self::Shrink { from, to } | Self::Yield { from, to } => {
                Some((from, to))
            }
            Self::Keep | Self::Crowded { .. } | Self::Hopeless | Self::Wait { .. } => None,
        }
    }
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
    /// People hold the share.
    Held,
    /// The GPU is overloaded: workers warm up there one at a time, and no share shrinks.
    Overload,
    /// SLOs are missed by models of its priority or near it, for which lower ones are to make room: its share does not shrink.
    Misses,
    /// It has made room, and it is still open whether that helps, which shows while nobody moves.
    Trial,
}
