//! What the machine hears, and what it has done.

use std::time::Duration;

use shadowslice_shared::batch::PartitionReply;
use shadowslice_shared::boot::{BootRefusal, WarmUpReport, WorkerPurpose};
use shadowslice_shared::groups::Groups;
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::{Percent, Sms, Timestamp};

use super::change::{ChangeReport, Failover, Reason, ResizeRefused};
use crate::scheduler::Slice;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandoverMode {
    /// Inside the worker where that can be, else by a shadow.
    Auto,
    /// By a partition of the GPU's SMs; the model does not serve where that cannot be.
    InProcess,
    /// A second worker warms up beside the first, and takes over.
    Shadow,
    /// The worker stops, and starts again at the new share; requests wait.
    Restart,
    Never,
}

impl HandoverMode {
    pub fn may_be_in_process(self) -> bool {
        matches!(self, Self::Auto | Self::InProcess)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// From the spawn to the hello.
    pub spawn: Duration,
    /// Loading, warming up and proving.
    pub warm: Duration,
    /// Until the last answer of a worker from which the traffic was taken.
    pub drain: Duration,
    /// How long the incumbent stays parked. A time to wait rather than a limit.
    pub dwell: Duration,
    /// From asking to exit to killing, and from one kill to the next.
    pub stop: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    pub model: String,
    pub min: Percent,
    pub max: Percent,
    pub handover: HandoverMode,
    /// A second worker stands ready at the share in force.
    pub standby: bool,
    pub timeouts: Timeouts,
    /// A policy changes shares, so that one that is set by hand must be held.
    pub policy_acts: bool,
    /// The model's GPU is real, and can compute reference answers that the CPU cannot.
    pub on_gpu: bool,
    /// What the first worker of the model is for.
    pub reference: WorkerPurpose,
    /// Of a worker with 1 %, 2 % and so on to 100 % of the GPU.
    pub sms: Box<[Sms]>,
}

impl Settings {
    pub(super) fn sms_of(&self, share: Percent) -> Sms {
        self.sms[share.get() as usize - 1]
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// An operator, or a changed configuration.
    Hand,
    Policy,
    /// The worker that serves cannot have the share any more, and another worker can.
    Worker,
}

impl Cause {
    pub fn name(self) -> &'static str {
        match self {
            Self::Hand => "hand",
            Self::Policy => "policy",
            Self::Worker => "worker",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResizeRequest {
    /// Which reports answer it; `None` where no operator and no policy asked.
    pub number: Option<u64>,
    pub share: Percent,
    pub cause: Cause,
    pub decided: Timestamp,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Fact {
    Resize {
        request: ResizeRequest,
        /// The policy must not change the share again.
        hold: bool,
    },
    /// Nothing has changed that the model's workers were started with.
    Configured(Settings),
    Stop,
    /// The worker of an [`Action::Start`] has no process.
    NotStarted {
        worker: WorkerId,
        failure: StartFailure,
    },
    /// The worker speaks the same protocol.
    Connected(WorkerId),
    /// An error where the answers cannot be kept.
    ReferenceWritten {
        worker: WorkerId,
        result: Result<(), String>,
    },
    /// The worker is loaded and warm, and has proved its answers and its SMs.
    Warmed {
        worker: WorkerId,
        warmed: WarmUpReport,
        /// The partition with which the worker was to begin, where its share is one.
        asked: Option<Groups>,
    },
    /// The worker cannot start, load, warm up or prove itself, and ends.
    Refused {
        worker: WorkerId,
        refusal: BootRefusal,
    },
    /// The worker hangs, breaks the protocol, or lacks what it promised.
    Misbehaved {
        worker: WorkerId,
        why: String,
    },
    /// The process will end, too, which takes a while on a GPU.
    LaneEnded {
        worker: WorkerId,
        /// The worker had no batch.
        idle: bool,
    },
    /// The process is gone: told once, after all else that the worker said.
    Exited {
        worker: WorkerId,
        status: String,
        /// The worker had no batch.
        idle: bool,
    },
    /// The worker of an [`Action::Drain`] has nothing in flight any more.
    Drained(WorkerId),
    /// The worker's first batch since the traffic came to it.
    FirstAnswer(WorkerId),
    /// A request has proved that it kills its workers: their deaths were not the model's doing.
    PoisonConfirmed,
    /// The worker of an [`Action::Prepare`] has made the partition ready, or cannot.
    Prepared {
        worker: WorkerId,
        prepared: PartitionReply,
    },
    /// The groups that the model is to have: answers [`Action::AskGroups`], and comes whenever they
    /// change.
    Groups(Groups),
    /// A start that failed for a passing reason may succeed now.
    WaitIsOver,
    /// The standing worker must go: its memory is needed, or there is none for it.
    MustNotStand(String),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StartFailure {
    /// Nothing stands in the way of another attempt before long.
    Passing {
        why: String,
        /// Standing workers were called in, so memory will be free soon.
        memory_comes: bool,
    },
    /// There is no memory for a worker that only stands ready, or others start first.
    NoRoomToStand(String),
    Failed(String),
}

impl StartFailure {
    pub(super) fn why(self) -> String {
        match self {
            Self::Passing { why, .. } | Self::NoRoomToStand(why) | Self::Failed(why) => why,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    pub worker: WorkerId,
    pub purpose: WorkerPurpose,
    pub share: Percent,
    /// Another worker serves meanwhile, so this one starts at low CPU priority.
    pub spare: bool,
    /// The worker will only stand ready, for which there must be memory enough.
    pub stands: bool,
}

/// To be done in the order given.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// [`Fact::NotStarted`] tells at once if that fails.
    Start(Launch),
    Load(WorkerId),
    /// Put the warm worker's lane on the data path, with no traffic.
    Attach {
        worker: WorkerId,
        share: Percent,
        slice: Slice,
        /// Batch sizes that the worker has warmed up.
        sizes: Vec<u32>,
    },
    /// Send all batches to this worker from now on, at normal CPU priority, and take requests.
    Route(WorkerId),
    /// Requests wait.
    Unroute,
    /// Refuse requests from now on, and those that wait.
    Shut(String),
    Drain(WorkerId),
    /// Serve elsewhere what the worker has, without blame.
    Requeue(WorkerId),
    /// Serve elsewhere what the worker has; the batch that it executes is to blame.
    Condemn(WorkerId),
    /// The worker is waited for: give it normal CPU priority.
    Hurry(WorkerId),
    /// The worker finishes its batch first.
    Stop(WorkerId),
    Kill(WorkerId, String),
    /// `cannot` is a partition that the model cannot have.
    AskGroups {
        count: usize,
        cannot: Option<Groups>,
    },
    Prepare(WorkerId, Groups),
    Forget(WorkerId, Groups),
    Move {
        worker: WorkerId,
        share: Percent,
        slice: Slice,
    },
    /// Whether a worker stands ready or starts in order to, and needs memory for that.
    Stands(bool),
    /// A worker that ran before stands ready from now on: [`Fact::MustNotStand`] if there is no
    /// memory for it.
    Keep(WorkerId),
    /// The model's share is changed by shadows from now on.
    NeedsShadows,
    /// Measure from now on how long batches wait for a lane; `outage`: since the last lane ended.
    MeasureStall {
        outage: bool,
    },
    /// Measure when this worker's first batch is done: by then the change is in effect. `None`
    /// after a death.
    AwaitEffect(WorkerId, Option<ResizeRequest>),
    /// Count this, and answer the request that it is about.
    Report(Report),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Report {
    /// A hand-over, to this worker if it runs already.
    Begun(ResizeRequest, Option<WorkerId>),
    Completed(ChangeReport),
    /// A hand-over did not complete, or was taken back.
    NotKept {
        change: ChangeReport,
        /// The hand-over had completed.
        rolled_back: bool,
        reason: Reason,
    },
    /// The change had begun, and was no hand-over.
    Aborted(ResizeRequest, ResizeRefused),
    Refused(ResizeRequest, ResizeRefused),
    FailedOver(Failover),
}
