//! A change of share: which one is under way, why it may be refused, and how it ends.

use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::{Percent, Sms, Timestamp};

use super::messages::ResizeRequest;

pub(super) const WRONG_AT_A_SHARE: &str = "Two workers with this share answered wrongly, so that no further one is tried. \
    Half precision (FP16, BF16) is wrong under MPS percentages below 100 % on Hopper GPUs (cuBLAS); it is right with \
    `handover: in-process`, and at a share of 100 %";

/// There is one at most.
#[derive(Debug)]
pub(super) enum OngoingChange {
    /// To a shadow. The roles of its two workers say how far it is.
    Handover {
        request: ResizeRequest,
        from: Percent,
        /// Whether the shadow stood ready when the change began.
        at_once: bool,
        /// Set while there is no memory for the shadow.
        retry: Option<MemoryRetry>,
    },
    /// The worker leaves before the next one starts (`handover: restart`), or a model that was
    /// given up is tried again.
    Restart {
        request: ResizeRequest,
        from: Percent,
        /// Whether a worker served at the share before.
        served: bool,
    },
    Inside {
        request: ResizeRequest,
        from: Percent,
    },
}

/// `until`: the shadow must have said hello.
#[derive(Debug, Clone, Copy)]
pub(super) struct MemoryRetry {
    pub(super) at: Timestamp,
    pub(super) until: Timestamp,
}

impl OngoingChange {
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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeMechanism {
    InProcess,
    Shadow { at_once: bool },
    Restart,
}

/// A change that is in force, or came to nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChangeReport {
    pub request: ResizeRequest,
    pub from: Percent,
    pub mechanism: ChangeMechanism,
    pub sms: (Sms, Sms),
}

/// A standing worker serves in the place of one that died.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failover {
    pub worker: WorkerId,
    /// What the other worker died of.
    pub why: String,
    pub shares: (Percent, Percent),
    pub sms: (Sms, Sms),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum HandoverOutcome {
    Completed,
    /// The share was in force, and the incumbent took the traffic back.
    RolledBack(HandoverFailure),
    /// The share before is in force. The incumbent serves, or will when it is restarted.
    Aborted(HandoverFailure),
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HandoverFailure {
    /// The worker cannot start, load or warm up, or failed the proof.
    #[error("the new worker did not become ready: {0}")]
    BootFailed(String),
    #[error("the new worker did not report in time after it was started")]
    SpawnTimedOut,
    #[error("the new worker did not load and warm up in time")]
    WarmTimedOut,
    #[error("the new worker died")]
    Died,
    #[error("the new worker hung, broke the protocol, or was not what it promised to be")]
    Misbehaved,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ResizeRefused {
    #[error("{share} ({sms} SMs) is in force already; nothing was done")]
    InForce { share: Percent, sms: u32, serves: bool },
    #[error("{share} is outside of share.min {min} and share.max {max} of model '{model}'")]
    OutOfBounds { model: String, share: Percent, min: Percent, max: Percent },
    #[error("model '{0}' has `handover: never`: its share is set once, in the configuration")]
    Never(String),
    #[error("the share of model '{0}' is held; `shadowslice release {0}` lets the policy change it")]
    Held(String),
    #[error("a hand-over of model '{0}' is under way; ask again when it has ended")]
    Busy(String),
    #[error("model '{model}' cannot have a partition of that size: {why}; it has the share before")]
    NoPartition { model: String, why: String },
    #[error("model '{model}' does not answer rightly at {share}. {WRONG_AT_A_SHARE}")]
    Wrong { model: String, share: Percent },
    #[error("no worker of model '{model}' starts at that share; it has the one before again: {why}")]
    NoWorker { model: String, why: String },
    #[error("model '{model}' does not serve: {why}")]
    NotServing { model: String, why: String },
    #[error(
        "the workers of this model are told to end: the supervisor is stopping, or the model is unloaded or replaced"
    )]
    Stopping,
}
