//! A change of a model's share: its mechanism, its outcome, and the reasons for which it is refused.

use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::{Percent, Sms, Timestamp};

use super::messages::ResizeRequest;

/// The explanation that follows an error about wrong answers at a share below 100 %.
pub(super) const WRONG_AT_A_SHARE: &str = "Two workers with this share answered wrongly, so no further one is \
    started. Half precision (FP16, BF16) gives wrong results under MPS percentages below 100 % on Hopper GPUs \
    (cuBLAS); use `handover: in-process` or a share of 100 %";

/// The change of share that is in progress. A model has at most one at a time.
#[derive(Debug)]
pub(super) enum OngoingChange {
    /// A hand-over to a shadow. The phase of the hand-over is derived from the roles of the two
    /// workers.
    Handover {
        request: ResizeRequest,
        from: Percent,
        /// True if the shadow was already a warm standby when the change began.
        at_once: bool,
        /// The next attempt to start the shadow. It is set while the GPU has too little free memory for
        /// the shadow.
        retry: Option<MemoryRetry>,
    },
    /// The start of a model that was down.
    Revive { request: ResizeRequest, from: Percent },
    /// A change to another partition inside the worker.
    Inside { request: ResizeRequest, from: Percent },
}

/// The next attempt to start a shadow, at the time `at`. The shadow must connect before `until`.
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
            Self::Handover { request, .. } | Self::Revive { request, .. } | Self::Inside { request, .. } => {
                request
            }
        }
    }
}

/// The mechanism of a change of share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChangeMechanism {
    /// The worker's batches move to another partition of the GPU's SMs.
    InProcess,
    /// Another worker takes the traffic over.
    Shadow {
        /// True if the other worker was already warm when the change began.
        at_once: bool,
    },
    /// The model was down, and starts with the new share.
    Revive,
}

/// The details of a completed or failed change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChangeReport {
    /// The request for the change.
    pub request: ResizeRequest,
    /// The share before the change.
    pub from: Percent,
    /// The mechanism of the change.
    pub mechanism: ChangeMechanism,
    /// The numbers of SMs before and after the change.
    pub sms: (Sms, Sms),
}

/// A failover, in which a standby replaces a worker that died.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failover {
    /// The id of the standby.
    pub worker: WorkerId,
    /// The cause of the death of the worker that the standby replaces.
    pub why: String,
    /// The shares before and after the failover.
    pub shares: (Percent, Percent),
    /// The numbers of SMs before and after the failover.
    pub sms: (Sms, Sms),
}

/// The outcome of a hand-over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum HandoverOutcome {
    /// The new share stays in force.
    Completed,
    /// The new share was in force, but the shadow failed and the incumbent took the traffic back.
    RolledBack(HandoverFailure),
    /// The former share stays in force. The incumbent serves, or the worker that replaces it will
    /// serve.
    Aborted(HandoverFailure),
}

/// The reason why a hand-over failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HandoverFailure {
    /// The shadow could not start, load the model, warm up or pass the proof.
    #[error("the new worker did not become ready: {0}")]
    BootFailed(String),
    /// The shadow did not connect within `timeouts.spawn`.
    #[error("the new worker did not connect within timeouts.spawn; see the log, or raise timeouts.spawn")]
    SpawnTimedOut,
    /// The shadow was not warm within `timeouts.warm`.
    #[error(
        "the new worker did not load and warm up within timeouts.warm; see the log, or raise timeouts.warm"
    )]
    WarmTimedOut,
    /// The shadow died.
    #[error("the new worker exited unexpectedly; see the worker's lines in the log")]
    Died,
    /// The shadow hung, violated the protocol, or did not have the expected SMs or partition. The text
    /// says what happened.
    #[error("the new worker misbehaved: {0}")]
    Misbehaved(String),
}

/// The reason why a request for a new share was refused or failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ResizeRefused {
    /// The requested share is already in force.
    #[error("the model already has {share} ({sms} SMs); nothing was changed")]
    InForce {
        /// The requested share.
        share: Percent,
        /// The number of SMs of the share.
        sms: u32,
        /// True if a worker serves at present.
        serves: bool,
    },
    /// The requested share is outside the configured limits.
    #[error(
        "{share} is not between share.min {min} and share.max {max} of model '{model}'; request a share in this range"
    )]
    OutOfBounds {
        /// The name of the model.
        model: String,
        /// The requested share.
        share: Percent,
        /// The minimum share.
        min: Percent,
        /// The maximum share.
        max: Percent,
    },
    /// The model has `handover: never`, so its share cannot change.
    #[error("model '{0}' has `handover: never`; change its share in the configuration")]
    Never(String),
    /// An operator holds the share, so the policy must not change it.
    #[error("the share of model '{0}' is held; run `shadowslice release {0}` to let the policy change it")]
    Held(String),
    /// Another change is in progress.
    #[error("the share of model '{0}' is already changing; try again when this change is complete")]
    Busy(String),
    /// The worker cannot use a partition of this size.
    #[error(
        "model '{model}' cannot have a partition of this size: {why}; the model keeps its previous share"
    )]
    NoPartition {
        /// The name of the model.
        model: String,
        /// The reason why the worker cannot use the partition.
        why: String,
    },
    /// Several workers gave wrong answers at this share.
    #[error("model '{model}' answers wrongly at {share}. {WRONG_AT_A_SHARE}")]
    Wrong {
        /// The name of the model.
        model: String,
        /// The requested share.
        share: Percent,
    },
    /// The model has no serving worker.
    #[error("model '{model}' is not ready: {why}")]
    NotServing {
        /// The name of the model.
        model: String,
        /// The reason why no worker serves.
        why: String,
    },
    /// The model is stopping.
    #[error(
        "the workers of this model are stopping, because the supervisor stops, or because the model is unloaded or replaced"
    )]
    Stopping,
}
