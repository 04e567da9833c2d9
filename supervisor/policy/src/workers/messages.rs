//! The events of the state machine, and its actions.

use std::time::Duration;

use shadowslice_shared::batch::Prepared;
use shadowslice_shared::boot::{BootRefusal, Purpose, Warmed};
use shadowslice_shared::groups::Groups;
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::{Percent, Sms, Timestamp};

use super::change::{ChangeReport, Failover, HandoverFailure, ResizeRefused};
use crate::scheduler::Slice;

/// The configured mechanism of changes of share (`handover`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandoverMode {
    /// A change inside the worker if possible, or else a shadow.
    Auto,
    /// A partition of the GPU's SMs inside the worker. Without it, the model does not serve.
    InProcess,
    /// A second worker that warms up beside the first and takes over.
    Shadow,
    /// A restart of the worker at the new share; requests wait.
    Restart,
    /// The share never changes.
    Never,
}

impl HandoverMode {
    /// Returns true if the share may be a partition inside the worker.
    pub fn may_be_in_process(self) -> bool {
        matches!(self, Self::Auto | Self::InProcess)
    }
}

/// The time limits of a model's workers (`timeouts`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// The time from the start of a process until it connects.
    pub spawn: Duration,
    /// The time to load, warm up and prove the answers.
    pub warm: Duration,
    /// The time until the last answer of a worker that lost the traffic.
    pub drain: Duration,
    /// The time for which the incumbent stays parked. This is a wait and not a limit.
    pub dwell: Duration,
    /// The time between the order to exit and a kill, and between two kills.
    pub stop: Duration,
}

/// The settings of a model's workers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// The model's name.
    pub model: String,
    /// The smallest share.
    pub min: Percent,
    /// The largest share.
    pub max: Percent,
    /// The mechanism of changes of share.
    pub handover: HandoverMode,
    /// True if a standby is wanted at the share in force.
    pub standby: bool,
    /// The time limits.
    pub timeouts: Timeouts,
    /// True if a policy changes shares, so that a share set by an operator must be held.
    pub policy_acts: bool,
    /// True if the model's GPU is real, and can compute reference answers that the CPU cannot.
    pub on_gpu: bool,
    /// The purpose of the model's first worker.
    pub reference: Purpose,
    /// The SMs of a worker with 1 %, 2 % and so on to 100 % of the GPU.
    pub sms: Box<[Sms]>,
}

impl Settings {
    pub(super) fn sms_of(&self, share: Percent) -> Sms {
        self.sms[share.get() as usize - 1]
    }
}

/// The cause of a change of share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// An operator, or a changed configuration.
    Hand,
    /// The sharing policy.
    Policy,
    /// The worker that serves can no longer have the share, and another worker can.
    Worker,
}

impl Cause {
    /// Returns the name of the cause in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Hand => "hand",
            Self::Policy => "policy",
            Self::Worker => "worker",
        }
    }
}

/// A request for another share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResizeRequest {
    /// The number that connects the request with its answer; `None` if neither an operator nor the
    /// policy asked.
    pub number: Option<u64>,
    /// The requested share.
    pub share: Percent,
    /// The cause.
    pub cause: Cause,
    /// The time of the decision.
    pub decided: Timestamp,
}

/// An event in the life of a model's workers.
#[derive(Debug, Clone, PartialEq)]
pub enum LifecycleEvent {
    /// Another share is requested.
    Resize {
        /// The request.
        request: ResizeRequest,
        /// True if the policy must not change the share again.
        hold: bool,
    },
    /// The settings changed, but nothing that the workers were started with.
    Configured(Settings),
    /// The model stops.
    Stop,
    /// The worker of an [`Action::Start`] has no process.
    NotStarted {
        /// The worker.
        worker: WorkerId,
        /// The reason.
        failure: StartFailure,
    },
    /// The worker connected and speaks the same protocol.
    Connected(WorkerId),
    /// The worker wrote the reference answers. An error says why they cannot be kept.
    ReferenceWritten {
        /// The worker.
        worker: WorkerId,
        /// The result.
        result: Result<(), String>,
    },
    /// The worker is warm and has proved its answers and its SMs.
    Warmed {
        /// The worker.
        worker: WorkerId,
        /// The times of its batches and its partitions.
        warmed: Warmed,
        /// The partition with which the worker was to begin, if its share is one.
        asked: Option<Groups>,
    },
    /// The worker cannot start, load, warm up or prove itself, and exits.
    Refused {
        /// The worker.
        worker: WorkerId,
        /// The reason.
        refusal: BootRefusal,
    },
    /// The worker hangs, breaks the protocol, or does not have the promised properties.
    Misbehaved {
        /// The worker.
        worker: WorkerId,
        /// The reason.
        why: String,
    },
    /// The worker's lane ended. The process will exit, too, which takes a while on a GPU.
    LaneEnded {
        /// The worker.
        worker: WorkerId,
        /// True if the worker had no batch.
        idle: bool,
    },
    /// The process exited. This is the worker's last event, and comes once.
    Exited {
        /// The worker.
        worker: WorkerId,
        /// The exit status.
        status: String,
        /// True if the worker had no batch.
        idle: bool,
    },
    /// The worker of an [`Action::Drain`] has no batch any more.
    Drained(WorkerId),
    /// The worker answered its first batch since the traffic moved to it.
    FirstAnswer(WorkerId),
    /// A request is proved to kill its workers, so that the model did not cause their deaths.
    PoisonConfirmed,
    /// The worker of an [`Action::Prepare`] prepared the partition, or cannot.
    Prepared {
        /// The worker.
        worker: WorkerId,
        /// The partition and the result.
        prepared: Prepared,
    },
    /// The groups that the model should have. This answers [`Action::AskGroups`], and comes
    /// whenever the groups change.
    Groups(Groups),
    /// A start that failed temporarily may succeed now.
    WaitEnded,
    /// The standby must exit: its memory is needed, or it cannot have any.
    StandbyRevoked(String),
}

/// The reason why a worker did not start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StartFailure {
    /// A temporary failure; another attempt soon may succeed.
    Passing {
        /// The reason.
        why: String,
        /// True if standbys of other models exit, so that memory will be free soon.
        memory_expected: bool,
    },
    /// The GPU has no memory for a standby, or other workers start first.
    NoRoomForStandby(String),
    /// Another failure.
    Failed(String),
}

impl StartFailure {
    pub(super) fn why(self) -> String {
        match self {
            Self::Passing { why, .. } | Self::NoRoomForStandby(why) | Self::Failed(why) => why,
        }
    }
}

/// The start of a worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// The worker.
    pub worker: WorkerId,
    /// The purpose of the process.
    pub purpose: Purpose,
    /// The share.
    pub share: Percent,
    /// True if another worker serves meanwhile, so that this one starts at low CPU priority.
    pub low_priority: bool,
    /// True if the worker becomes a standby, which must not take memory that others need.
    pub standby: bool,
}

/// An action of the driver. Actions are carried out in the order given.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Start a worker. A failure is reported at once as [`LifecycleEvent::NotStarted`].
    Start(Launch),
    /// Let the worker load the model.
    Load(WorkerId),
    /// Add the warm worker's lane to the data path, without traffic.
    Attach {
        /// The worker.
        worker: WorkerId,
        /// Its share.
        share: Percent,
        /// The SMs of its batches.
        slice: Slice,
        /// The batch sizes that the worker has warmed up.
        sizes: Vec<u32>,
    },
    /// Send all batches to this worker from now on, at normal CPU priority, and accept requests.
    Route(WorkerId),
    /// Send no batches; requests wait.
    Unroute,
    /// Refuse all requests from now on, including those that wait.
    Shut(String),
    /// Let the worker finish its batches, without new ones.
    Drain(WorkerId),
    /// Serve the worker's requests elsewhere, without blame.
    Requeue(WorkerId),
    /// Serve the worker's requests elsewhere, and blame the batch that it executes.
    Condemn(WorkerId),
    /// Give the worker normal CPU priority, because the model waits for it.
    Hurry(WorkerId),
    /// Ask the worker to exit after its batch.
    Stop(WorkerId),
    /// Kill the worker, for this reason.
    Kill(WorkerId, String),
    /// Ask for a number of groups.
    AskGroups {
        /// The number of groups.
        count: usize,
        /// A partition that the model cannot have.
        cannot: Option<Groups>,
    },
    /// Let the worker prepare this partition.
    Prepare(WorkerId, Groups),
    /// Let the worker release this partition.
    Forget(WorkerId, Groups),
    /// Send further batches to other SMs.
    Move {
        /// The worker.
        worker: WorkerId,
        /// The share.
        share: Percent,
        /// The SMs.
        slice: Slice,
    },
    /// Record whether a standby exists or starts, and uses memory.
    StandbyExists(bool),
    /// Keep a worker that served as a standby. [`LifecycleEvent::StandbyRevoked`] follows if it
    /// cannot keep its memory.
    Keep(WorkerId),
    /// Record that the model's share changes by shadows from now on.
    NeedsShadows,
    /// Measure how long batches wait for a lane, from now on.
    MeasureStall {
        /// True if the measurement starts with the end of the last lane.
        outage: bool,
    },
    /// Measure when this worker's first batch is done, which is when the change takes effect. The
    /// request is `None` after a death.
    AwaitEffect(WorkerId, Option<ResizeRequest>),
    /// Count this report, and answer the request that it is about.
    Report(LifecycleReport),
}

/// A report about changes of share and failovers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LifecycleReport {
    /// A hand-over began, to this worker if it is already running.
    Begun(ResizeRequest, Option<WorkerId>),
    /// The new share is in force.
    Completed(ChangeReport),
    /// A hand-over did not complete, or was rolled back.
    HandoverFailed {
        /// The change.
        change: ChangeReport,
        /// True if the hand-over had completed.
        rolled_back: bool,
        /// The reason.
        reason: HandoverFailure,
    },
    /// A change that is not a hand-over began and failed.
    Aborted(ResizeRequest, ResizeRefused),
    /// The request is refused.
    Refused(ResizeRequest, ResizeRefused),
    /// A standby replaced a worker that died.
    FailedOver(Failover),
}
