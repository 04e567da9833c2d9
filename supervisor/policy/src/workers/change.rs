//! A change of share: its mechanism, the reasons for a refusal, and its outcome.

use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::{Percent, Sms, Timestamp};

use super::messages::ResizeRequest;

/// The explanation of wrong answers at a share below 100 %.
pub(super) const WRONG_AT_A_SHARE: &str = "Two workers with this share answered wrongly, so no further one is \
    started. Half precision (FP16, BF16) gives wrong results under MPS percentages below 100 % on Hopper GPUs \
    (cuBLAS); use `handover: in-process` or a share of 100 %";

/// The change of share that is under way; there is at most one.
#[derive(Debug)]
pub(super) enum OngoingChange {
    /// A hand-over to a shadow. The roles of its two workers show its phase.
    Handover {
        request: ResizeRequest,
        from: Percent,
        /// True if the shadow was a standby when the change began.
        at_once: bool,
        /// The next attempt to start the shadow, while the GPU has too little free memory for it.
        retry: Option<MemoryRetry>,
    },
    /// The worker exits before the next one starts (`handover: restart`), or a model that is down
    /// is restarted.
    Restart {
        request: ResizeRequest,
        from: Percent,
        /// True if a worker served at the former share.
        served: bool,
    },
    /// A change of the partition inside the worker.
    Inside { request: ResizeRequest, from: Percent },
}

/// The next attempt to start a shadow. The shadow must have connected before `until`.
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

/// The mechanism of a change of share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeMechanism {
    /// The worker moves to another partition of the GPU's SMs.
    InProcess,
    /// Another worker takes over.
    Shadow {
        /// True if that worker was ready when the change began.
        at_once: bool,
    },
    /// The worker exits, and another one starts.
    Restart,
}

/// A change that is in force, or that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChangeReport {
    /// The request.
    pub request: ResizeRequest,
    /// The former share.
    pub from: Percent,
    /// The mechanism.
    pub mechanism: ChangeMechanism,
    /// The SMs of the former and the new share.
    pub sms: (Sms, Sms),
}

/// A failover: a standby serves in the place of a worker that died.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failover {
    /// The standby.
    pub worker: WorkerId,
    /// The cause of the other worker's death.
    pub why: String,
    /// The former and the new share.
    pub shares: (Percent, Percent),
    /// The SMs of the former and the new share.
    pub sms: (Sms, Sms),
}

/// The outcome of a hand-over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum HandoverOutcome {
    /// The new share stays.
    Completed,
    /// The share was in force, and the incumbent took the traffic back.
    RolledBack(HandoverFailure),
    /// The former share is in force. The incumbent serves, or will serve after its restart.
    Aborted(HandoverFailure),
}

/// The reason why a hand-over failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HandoverFailure {
    /// The worker cannot start, load or warm up, or failed the proof.
    #[error("the new worker did not become ready: {0}")]
    BootFailed(String),
    /// The worker did not connect within `timeouts.spawn`.
    #[error("the new worker did not connect within timeouts.spawn; see the log, or raise timeouts.spawn")]
    SpawnTimedOut,
    /// The worker was not warm within `timeouts.warm`.
    #[error(
        "the new worker did not load and warm up within timeouts.warm; see the log, or raise timeouts.warm"
    )]
    WarmTimedOut,
    /// The worker died.
    #[error("the new worker exited unexpectedly; see the worker's lines in the log")]
    Died,
    /// The worker hung, broke the protocol, or does not have the promised properties.
    #[error(
        "the new worker hung, broke the protocol, or does not have the SMs or partition that it promised"
    )]
    Misbehaved,
}

/// The reason why a request for another share is refused or fails.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ResizeRefused {
    /// The share is already in force.
    #[error("the model already has {share} ({sms} SMs); nothing was changed")]
    InForce {
        /// The requested share.
        share: Percent,
        /// Its SMs.
        sms: u32,
        /// True if a worker serves.
        serves: bool,
    },
    /// The share is out of bounds.
    #[error(
        "{share} is not between share.min {min} and share.max {max} of model '{model}'; request a share in this range"
    )]
    OutOfBounds {
        /// The model's name.
        model: String,
        /// The requested share.
        share: Percent,
        /// The smallest share.
        min: Percent,
        /// The largest share.
        max: Percent,
    },
    /// The model has `handover: never`.
    #[error("model '{0}' has `handover: never`; change its share in the configuration")]
    Never(String),
    /// The share is held.
    #[error("the share of model '{0}' is held; run `shadowslice release {0}` to let the policy change it")]
    Held(String),
    /// Another change is under way.
    #[error("the share of model '{0}' is already changing; try again when this change is complete")]
    Busy(String),
    /// The worker cannot have a partition of this size.
    #[error(
        "model '{model}' cannot have a partition of this size: {why}; the model keeps its previous share"
    )]
    NoPartition {
        /// The model's name.
        model: String,
        /// The reason.
        why: String,
    },
    /// Workers answered wrongly at this share.
    #[error("model '{model}' answers wrongly at {share}. {WRONG_AT_A_SHARE}")]
    Wrong {
        /// The model's name.
        model: String,
        /// The requested share.
        share: Percent,
    },
    /// No worker started at the new share.
    #[error(
        "no worker of model '{model}' starts at this share, so the model returns to its previous share: {why}"
    )]
    NoWorker {
        /// The model's name.
        model: String,
        /// The failure of the last worker.
        why: String,
    },
    /// The model has no worker that serves.
    #[error("model '{model}' is not ready: {why}")]
    NotServing {
        /// The model's name.
        model: String,
        /// The reason.
        why: String,
    },
    /// The model is stopping.
    #[error(
        "the workers of this model are stopping, because the supervisor stops, or because the model is unloaded or replaced"
    )]
    Stopping,
}
