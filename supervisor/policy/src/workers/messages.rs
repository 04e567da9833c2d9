//! The events that the state machine handles, and the actions that it returns.

use std::time::Duration;

use shadowslice_shared::batch::PartitionReply;
use shadowslice_shared::boot::{BootRefusal, WarmUpReport, WorkerPurpose};
use shadowslice_shared::groups::Groups;
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::{Percent, Sms, Timestamp};

use super::change::{ChangeReport, Failover, HandoverFailure, ResizeRefused};
use crate::scheduler::Slice;

/// The configured mechanism for changes of a model's share (`handover`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandoverMode {
    /// A change inside the worker if possible, otherwise a hand-over to a shadow.
    Auto,
    /// A partition of the GPU's SMs inside the worker. If the worker cannot have partitions, the model
    /// does not serve.
    InProcess,
    /// A hand-over to a second worker, which warms up while the first one serves.
    Shadow,
    /// The share never changes.
    Never,
}

impl HandoverMode {
    /// Returns true if the share may be a partition inside the worker.
    pub fn may_be_in_process(self) -> bool {
        matches!(self, Self::Auto | Self::InProcess)
    }
}

/// The time limits for a model's workers (`timeouts`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// The maximum time from the start of a process until the worker connects.
    pub spawn: Duration,
    /// The maximum time in which the worker loads the model, warms up and passes the proof.
    pub warm: Duration,
    /// The maximum time until the last answer of a worker that gets no new batches.
    pub drain: Duration,
    /// The time for which the incumbent stays parked after a hand-over. Unlike all other fields, this
    /// field is not a limit.
    pub dwell: Duration,
    /// The time between the order to exit and the first kill, and between repeated kills.
    pub stop: Duration,
}

/// The settings for a model's workers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// The name of the model.
    pub model: String,
    /// The minimum share.
    pub min: Percent,
    /// The maximum share.
    pub max: Percent,
    /// The mechanism for changes of the share.
    pub handover: HandoverMode,
    /// True if the model should have a warm standby at the share in force.
    pub standby: bool,
    /// The time limits for the workers.
    pub timeouts: Timeouts,
    /// True if a sharing policy changes shares. In that case, a share that an operator sets is held, so
    /// that the policy does not change it.
    pub policy_acts: bool,
    /// True if the model's GPU is a real GPU. A real GPU can compute reference answers for models that
    /// the CPU does not support.
    pub on_gpu: bool,
    /// The purpose of the model's first worker.
    pub reference: WorkerPurpose,
    /// The number of SMs of a worker for each share, from 1 % to 100 % of the GPU.
    pub sms: Box<[Sms]>,
}

impl Settings {
    pub(super) fn sms_of(&self, share: Percent) -> Sms {
        self.sms[share.get() as usize - 1]
    }
}

/// The cause of a change of a model's share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// An operator's command, or a changed configuration.
    Hand,
    /// The sharing policy.
    Policy,
    /// The serving worker lost its share and uses the whole GPU, so another worker restores the share.
    Worker,
}

/// A request for a new share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResizeRequest {
    /// The number of the request, which its answer repeats. This is `None` if the request comes neither
    /// from an operator nor from the policy.
    pub number: Option<u64>,
    /// The requested share.
    pub share: Percent,
    /// The cause of the request.
    pub cause: Cause,
    /// The time at which the new share was decided.
    pub decided: Timestamp,
}

/// An event in the lifecycle of a model's workers.
#[derive(Debug, Clone, PartialEq)]
pub enum LifecycleEvent {
    /// A request for a new share.
    Resize {
        /// The requested share, with its cause.
        request: ResizeRequest,
        /// True if the policy must not change the share after this request.
        hold: bool,
    },
    /// The settings changed, but running workers do not need a restart.
    Configured(Settings),
    /// The model stops.
    Stop,
    /// The model sleeps. The worker, which cannot release its weights, has no batches and must exit.
    Sleep(WorkerId),
    /// The model, which has slept without a worker, must serve again.
    Wake,
    /// The driver could not start a process for the worker of an [`Action::Start`].
    NotStarted {
        /// The id of the worker.
        worker: WorkerId,
        /// The reason for the failure.
        failure: StartFailure,
    },
    /// The worker has connected, and its protocol version is right.
    Connected(WorkerId),
    /// The worker wrote the reference answers.
    ReferenceWritten {
        /// The id of the worker.
        worker: WorkerId,
        /// Success, or the reason why the supervisor cannot keep the answers.
        result: Result<(), String>,
    },
    /// The worker is warm and has passed the proof. Its number of SMs is correct.
    Warmed {
        /// The id of the worker.
        worker: WorkerId,
        /// The times of its batches, and its partitions.
        warmed: Box<WarmUpReport>,
        /// The partition that the worker was started with, if its share is a partition.
        asked: Option<Groups>,
    },
    /// The worker could not start, load the model, warm up or pass the proof. The worker exits.
    Refused {
        /// The id of the worker.
        worker: WorkerId,
        /// The reason for the refusal.
        refusal: BootRefusal,
    },
    /// The worker hangs, violates the protocol, or does not have the expected SMs or partition.
    Misbehaved {
        /// The id of the worker.
        worker: WorkerId,
        /// The description of the fault.
        why: String,
    },
    /// The worker's lane ended because its socket closed. The process is about to exit, which takes
    /// some time on a GPU.
    LaneEnded {
        /// The id of the worker.
        worker: WorkerId,
        /// True if the worker had no batch.
        idle: bool,
    },
    /// The process exited. This event occurs once, and no event of the worker follows it.
    Exited {
        /// The id of the worker.
        worker: WorkerId,
        /// The exit status of the process.
        status: String,
        /// True if the worker had no batch.
        idle: bool,
    },
    /// The worker of an [`Action::Drain`] has finished its batches.
    Drained(WorkerId),
    /// The worker answered its first batch since it took the traffic over.
    FirstAnswer(WorkerId),
    /// A request is proved to kill its workers, so the deaths of these workers do not count against the
    /// model.
    PoisonConfirmed,
    /// The worker of an [`Action::Prepare`] has prepared the partition, or could not prepare it.
    Prepared {
        /// The id of the worker.
        worker: WorkerId,
        /// The partition, and whether it is ready.
        prepared: PartitionReply,
    },
    /// The groups that the model should have. This event answers [`Action::AskGroups`]. It also occurs
    /// when other models cause the groups to change.
    Groups(Groups),
    /// A start that failed temporarily may now succeed.
    WaitEnded,
    /// The standby must exit, because other workers need its memory, or because the GPU has too little
    /// memory to keep the standby. The text is the reason.
    StandbyRevoked(String),
}

/// The reason why the driver could not start a worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StartFailure {
    /// A temporary failure. A later attempt may succeed.
    Passing {
        /// The description of the failure.
        why: String,
        /// True if standbys of other models are exiting, so that memory will soon be free.
        memory_expected: bool,
    },
    /// The GPU has no memory for a standby, or other workers must start first.
    NoRoomForStandby(String),
    /// A failure of another kind.
    Failed(String),
}

impl StartFailure {
    pub(super) fn why(self) -> String {
        match self {
            Self::Passing { why, .. } | Self::NoRoomForStandby(why) | Self::Failed(why) => why,
        }
    }
}

/// The parameters with which a worker starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// The id of the worker.
    pub worker: WorkerId,
    /// The purpose of the worker process.
    pub purpose: WorkerPurpose,
    /// The share of the worker.
    pub share: Percent,
    /// True if another worker serves at the same time. The new worker then starts with a low CPU
    /// priority.
    pub low_priority: bool,
    /// True if the worker becomes a standby. A standby must not take memory that other workers need.
    pub standby: bool,
}

/// An action for the driver. The driver applies actions in the order in which they are returned.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Starts a worker. The driver immediately reports a failure as [`LifecycleEvent::NotStarted`].
    Start(Launch),
    /// Sends the worker the order to load the model.
    Load(WorkerId),
    /// Adds a lane for the warm worker to the scheduler, without traffic.
    Attach {
        /// The id of the worker.
        worker: WorkerId,
        /// The share of the worker.
        share: Percent,
        /// The SMs on which the worker's batches run.
        slice: Slice,
        /// The batch sizes that the worker has warmed up, in rows.
        sizes: Vec<u32>,
    },
    /// Sends all further batches to this worker, gives it the normal CPU priority, and accepts
    /// requests.
    Route(WorkerId),
    /// Refuses all further requests and all waiting requests, with this reason.
    Shut(String),
    /// Sends no new batches to the worker, which finishes the batches that it has.
    Drain(WorkerId),
    /// Returns the worker's requests to the queue, so that another worker serves them. No request is
    /// blamed for the worker's fault.
    Requeue(WorkerId),
    /// Returns the worker's requests to the queue, and blames the requests of the batch that the worker
    /// is executing.
    Condemn(WorkerId),
    /// Gives the worker the normal CPU priority, because the model waits for it.
    Hurry(WorkerId),
    /// Orders the worker to exit after its current batch.
    Stop(WorkerId),
    /// Sends the worker batches again, because it cannot exit for the sleep of the model now.
    StayAwake(WorkerId),
    /// Kills the worker. The text is the reason.
    Kill(WorkerId, String),
    /// Requests a number of groups for the model.
    AskGroups {
        /// The number of groups.
        count: usize,
        /// A partition that the model cannot use, if there is one to report.
        cannot: Option<Groups>,
    },
    /// Orders the worker to prepare this partition.
    Prepare(WorkerId, Groups),
    /// Orders the worker to release this partition.
    Forget(WorkerId, Groups),
    /// Sends the worker's further batches to other SMs.
    Move {
        /// The id of the worker.
        worker: WorkerId,
        /// The new share.
        share: Percent,
        /// The SMs on which further batches run.
        slice: Slice,
    },
    /// Records whether the model has a running or starting standby, which uses GPU memory.
    StandbyExists(bool),
    /// Keeps a worker that has served as a standby. If the worker cannot keep its memory,
    /// [`LifecycleEvent::StandbyRevoked`] follows.
    Keep(WorkerId),
    /// Records that the model's share can only change by shadows.
    NeedsShadows,
    /// Starts to measure how long a batch waits for a worker that can take it.
    MeasureStall {
        /// True if the measurement starts at the end of the last lane. False if the measurement starts
        /// now.
        outage: bool,
    },
    /// Measures when this worker completes its first batch, which is the time at which the change takes
    /// effect. The request is `None` if the worker replaces a dead worker.
    AwaitEffect(WorkerId, Option<ResizeRequest>),
    /// Counts this report, and answers the request that the report is about.
    Report(LifecycleReport),
}

/// A report about a change of share or a failover.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LifecycleReport {
    /// A hand-over began. If its shadow is already running, the report names that worker.
    Begun(ResizeRequest, Option<WorkerId>),
    /// The new share is in force.
    Completed(ChangeReport),
    /// A hand-over failed, or was rolled back.
    HandoverFailed {
        /// The change that the hand-over was for.
        change: ChangeReport,
        /// True if the hand-over had completed before it failed.
        rolled_back: bool,
        /// The reason for the failure.
        reason: HandoverFailure,
    },
    /// A change other than a hand-over failed after it had started.
    Aborted(ResizeRequest, ResizeRefused),
    /// The request was refused.
    Refused(ResizeRequest, ResizeRefused),
    /// A standby replaced a worker that died.
    FailedOver(Failover),
}
