//! A change of share: which one is under way, why it may be refused, and how it ends.

use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::{Moment, Percent, Sms};

use super::messages::ResizeRequest;

/// What is known of repeated wrong answers, and what helps.
pub(super) const WRONG_AT_A_SHARE: &str = "Two workers with this share answered wrongly, so that no further one is tried. \
    Half precision (FP16, BF16) is wrong under MPS percentages below 100 % on Hopper GPUs (cuBLAS); it is right with \
    `handover: in-process`, and at a share of 100 %";

/// The change of share that is under way; there is one at most.
#[derive(Debug)]
pub(super) enum Change {
    /// To a shadow. The roles of its two workers say how far it is.
    Handover {
        request: ResizeRequest,
        /// The share before.
        from: Percent,
        /// Whether the shadow stood ready when it began.
        at_once: bool,
        /// The next attempt to start a shadow for which there is no memory yet.
        retry: Option<Retry>,
    },
    /// The worker leaves before the next one starts (`handover: restart`), or a model that was given
    /// up is tried again.
    Restart {
        request: ResizeRequest,
        from: Percent,
        /// Whether a worker served at the share before.
        served: bool,
    },
    /// Inside the worker.
    Inside { request: ResizeRequest, from: Percent },
}

/// When a shadow is started again, and until when it must have said hello.
#[derive(Debug, Clone, Copy)]
pub(super) struct Retry {
    pub(super) at: Moment,
    pub(super) until: Moment,
}

impl Change {
    pub(super) fn is_inside(&self) -> bool {
        matches!(self, Self::Inside { .. })
    }

    pub(super) fn request(&self) -> &ResizeRequest {
        match self {
            Self::Handover { request, .. } | Self::Restart { request, .. } | Self::Inside { request, .. } => {
                request
            }
        }
    }
}

/// By which means a share was changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Means {
    /// Inside the worker.
    InProcess,
    /// By a shadow, which may have stood ready.
    Shadow {
        /// Whether it did.
        at_once: bool,
    },
    /// By a restart.
    Restart,
}

/// A change of share that is in force, or came to nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChangeReport {
    /// What was asked for.
    pub request: ResizeRequest,
    /// The share before.
    pub from: Percent,
    /// How it was done.
    pub means: Means,
    /// The SMs before and after.
    pub sms: (Sms, Sms),
}

/// A standing worker serves in the place of one that died.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failover {
    /// The one that serves now.
    pub worker: WorkerId,
    /// What the other one died of.
    pub why: String,
    /// The share before, and the share from now on.
    pub shares: (Percent, Percent),
    /// Their SMs.
    pub sms: (Sms, Sms),
}

/// How a hand-over ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The shadow serves.
    Kept,
    /// The share was in force, and the incumbent took the traffic back.
    RolledBack(Reason),
    /// The change did not complete, so the share before is in force. The incumbent serves, or will when
    /// it is restarted.
    Aborted(Reason),
}

/// Why a shadow does not serve.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// It cannot start, load or warm up, or failed the proof.
    #[error("the new worker did not become ready: {0}")]
    BootFailed(String),
    /// It did not say hello.
    #[error("the new worker did not report in time after it was started")]
    SpawnTimedOut,
    /// It did not become warm.
    #[error("the new worker did not load and warm up in time")]
    WarmTimedOut,
    /// Its process or its lane ended.
    #[error("the new worker died")]
    Died,
    /// It hung, broke the protocol, or was not what it promised to be.
    #[error("the new worker hung, broke the protocol, or was not what it promised to be")]
    Misbehaved,
}

/// Why a share is not changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ResizeRefused {
    /// It is in force.
    #[error("{share} ({sms} SMs) is in force already; nothing was done")]
    InForce {
        /// The share asked for.
        share: Percent,
        /// Its SMs.
        sms: u32,
    },
    /// The configuration forbids it.
    #[error("{share} is outside of share.min {min} and share.max {max} of model '{model}'")]
    OutOfBounds {
        /// The model.
        model: String,
        /// The share asked for.
        share: Percent,
        /// The least.
        min: Percent,
        /// The most.
        max: Percent,
    },
    /// The configuration forbids any.
    #[error("model '{0}' has `handover: never`: its share is set once, in the configuration")]
    Never(String),
    /// An operator holds it.
    #[error("the share of model '{0}' is held; `shadowslice release {0}` lets the policy change it")]
    Held(String),
    /// Something else is under way.
    #[error("a hand-over of model '{0}' is under way; ask again when it has ended")]
    Busy(String),
    /// Its worker cannot have it as a partition.
    #[error("model '{model}' cannot have a partition of that size: {why}; it has the share before")]
    NoPartition {
        /// The model.
        model: String,
        /// Why it cannot.
        why: String,
    },
    /// Workers with that share answered wrongly.
    #[error("model '{model}' does not answer rightly at {share}. {WRONG_AT_A_SHARE}")]
    Wrong {
        /// The model.
        model: String,
        /// The share asked for.
        share: Percent,
    },
    /// It has `handover: restart`, and its worker did not start at that share.
    #[error("no worker of model '{model}' starts at that share; it has the one before again: {why}")]
    NoWorker {
        /// The model.
        model: String,
        /// What the worker died of.
        why: String,
    },
    /// There is nothing to hand over from.
    #[error("model '{model}' does not serve: {why}")]
    NotServing {
        /// The model.
        model: String,
        /// Why it does not.
        why: String,
    },
    /// The supervisor ends, or the model's workers do.
    #[error(
        "the workers of this model are told to end: the supervisor is stopping, or the model is unloaded or replaced"
    )]
    Stopping,
}
