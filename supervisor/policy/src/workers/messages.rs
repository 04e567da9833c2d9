//! What the machine hears, and what it has done.

use std::time::Duration;

use shadowslice_shared::batch::Prepared;
use shadowslice_shared::boot::{BootRefusal, Purpose, Warmed};
use shadowslice_shared::groups::Groups;
use shadowslice_shared::ids::WorkerId;
use shadowslice_shared::units::{Moment, Percent, Sms};

use super::change::{ChangeReport, Failover, Reason, ResizeRefused};
use crate::scheduler::Slice;

/// How a model's share is changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HandoverMode {
    /// Inside the worker where that can be, else by a shadow.
    Auto,
    /// Inside the worker, which has a partition of the GPU's SMs; the model does not serve where
    /// that cannot be.
    InProcess,
    /// A second worker warms up beside the first, and takes over.
    Shadow,
    /// The worker stops, and starts again at the new share; requests wait.
    Restart,
    /// It is not.
    Never,
}

impl HandoverMode {
    /// Whether a share may be a partition inside the worker.
    pub fn may_be_in_process(self) -> bool {
        matches!(self, Self::Auto | Self::InProcess)
    }
}

/// How long each phase of a worker may last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timeouts {
    /// From its spawn to its hello.
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

/// What the machine goes by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// The model's name, for texts.
    pub model: String,
    /// The least share.
    pub min: Percent,
    /// The largest share.
    pub max: Percent,
    /// How the share is changed.
    pub handover: HandoverMode,
    /// Whether a second worker stands ready at the share in force.
    pub standby: bool,
    /// Bounds on each phase.
    pub timeouts: Timeouts,
    /// Whether a policy changes shares, so that one that is set by hand must be held.
    pub policy_acts: bool,
    /// Whether the model's GPU is real, and can compute reference answers that the CPU cannot.
    pub on_gpu: bool,
    /// The SMs of a worker with 1 %, 2 % and so on to 100 % of the GPU.
    pub sms: Box<[Sms]>,
}

impl Settings {
    /// The SMs of a worker with this share.
    pub(super) fn sms_of(&self, share: Percent) -> Sms {
        self.sms[share.get() as usize - 1]
    }
}

/// The cause of a change of share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    /// An operator, or a changed configuration.
    Hand,
    /// The policy, as it decides once an interval.
    Policy,
    /// The worker that serves cannot have the share any more, and another worker can.
    Worker,
}

impl Cause {
    /// Its name, for reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Hand => "hand",
            Self::Policy => "policy",
            Self::Worker => "worker",
        }
    }
}

/// A share that is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResizeRequest {
    /// Which reports answer it; `None` where no operator and no policy asked.
    pub number: Option<u64>,
    /// The share.
    pub share: Percent,
    /// Why it is wanted.
    pub cause: Cause,
    /// When it was asked for.
    pub decided: Moment,
}

/// What has happened.
#[derive(Debug, Clone, PartialEq)]
pub enum Fact {
    /// Another share is wanted; `hold`: it is to be held from then on.
    Resize {
        /// The request.
        request: ResizeRequest,
        /// Whether the policy must not change the share again.
        hold: bool,
    },
    /// The model is configured otherwise: in nothing that its workers were started with.
    Configured(Settings),
    /// All workers are to end.
    Stop,
    /// The worker of an [`Action::Start`] has no process.
    NotStarted {
        /// The worker.
        worker: WorkerId,
        /// Why.
        failure: StartFailure,
    },
    /// The worker has said hello, and speaks the same protocol.
    Connected(WorkerId),
    /// A reference worker has written the reference answers; or they cannot be kept, and why.
    ReferenceWritten {
        /// The worker.
        worker: WorkerId,
        /// Whether they are there.
        result: Result<(), String>,
    },
    /// The worker is loaded and warm, and has proved its answers and its SMs.
    Warmed {
        /// The worker.
        worker: WorkerId,
        /// What it found.
        warmed: Warmed,
        /// The partition with which it was to begin, where its share is one.
        asked: Option<Groups>,
    },
    /// The worker cannot start, load, warm up or prove itself, and ends.
    Refused {
        /// The worker.
        worker: WorkerId,
        /// Why.
        refusal: BootRefusal,
    },
    /// The worker hangs, breaks the protocol, or lacks what it promised.
    Misbehaved {
        /// The worker.
        worker: WorkerId,
        /// What it did.
        why: String,
    },
    /// The worker's lane has ended; its process will end, too, which takes a while on a GPU.
    LaneEnded {
        /// The worker.
        worker: WorkerId,
        /// Whether it had no batch.
        idle: bool,
    },
    /// The worker's process is gone: told once, after all else that the worker said.
    Exited {
        /// The worker.
        worker: WorkerId,
        /// How it ended.
        status: String,
        /// Whether it had no batch.
        idle: bool,
    },
    /// The worker of an [`Action::Drain`] has nothing in flight any more.
    Drained(WorkerId),
    /// The worker has answered its first batch since the traffic came to it.
    FirstAnswer(WorkerId),
    /// A request has proved that it kills its workers: their deaths were not the model's doing.
    PoisonConfirmed,
    /// The worker of an [`Action::Prepare`] has made the partition ready, or cannot.
    Prepared {
        /// The worker.
        worker: WorkerId,
        /// Which partition, and whether.
        prepared: Prepared,
    },
    /// The groups of SMs that the model is to have: answers [`Action::AskGroups`], and comes
    /// whenever they change.
    Groups(Groups),
    /// The standing worker must go, for this reason: its memory is needed, or there is none for it.
    MustNotStand(String),
}

/// Why a worker was not started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StartFailure {
    /// Nothing stands in the way of another attempt before long.
    Passing {
        /// The reason.
        why: String,
        /// Whether memory for it will be free soon, as standing workers were called in.
        memory_comes: bool,
    },
    /// There is no memory for a worker that only stands ready.
    NoRoomToStand(String),
    /// Anything else.
    Failed(String),
}

impl StartFailure {
    pub(super) fn why(self) -> String {
        match self {
            Self::Passing { why, .. } | Self::NoRoomToStand(why) | Self::Failed(why) => why,
        }
    }
}

/// A worker that is to be started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// Its name.
    pub worker: WorkerId,
    /// What it is for.
    pub purpose: Purpose,
    /// Its share.
    pub share: Percent,
    /// Whether another worker serves meanwhile, so that it starts at low CPU priority.
    pub spare: bool,
    /// Whether it will only stand ready, for which there must be memory enough.
    pub stands: bool,
}

/// What the driver is to do, in the order given.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Start a worker. [`Fact::NotStarted`] tells at once if that fails.
    Start(Launch),
    /// Have the worker load, warm up and prove itself.
    Load(WorkerId),
    /// Put the warm worker's lane on the data path, with no traffic.
    Attach {
        /// The worker.
        worker: WorkerId,
        /// Its share.
        share: Percent,
        /// Where its batches run, and how long they should take there.
        slice: Slice,
        /// The batch sizes that it has warmed up.
        sizes: Vec<u32>,
    },
    /// Send all batches to this worker from now on, at normal CPU priority, and take requests.
    Route(WorkerId),
    /// Send batches to no worker; requests wait.
    Unroute,
    /// Refuse requests from now on, and those that wait, for this reason.
    Shut(String),
    /// Report when the worker has nothing in flight.
    Drain(WorkerId),
    /// Serve elsewhere what the worker has, without blame.
    Requeue(WorkerId),
    /// Serve elsewhere what the worker has; the batch that it executes is to blame.
    Condemn(WorkerId),
    /// The worker is waited for: give it normal CPU priority.
    Hurry(WorkerId),
    /// Have the worker finish its batch and exit.
    Stop(WorkerId),
    /// Kill the worker, for this reason.
    Kill(WorkerId, String),
    /// Ask for so many groups of SMs; `cannot` is a partition that the model cannot have.
    AskGroups {
        /// How many.
        count: usize,
        /// Which not.
        cannot: Option<Groups>,
    },
    /// Have the worker make a partition ready.
    Prepare(WorkerId, Groups),
    /// Have the worker let go of a partition.
    Forget(WorkerId, Groups),
    /// Have the worker's next batch run here.
    Move {
        /// The worker.
        worker: WorkerId,
        /// The share that this is.
        share: Percent,
        /// Where, and how long batches should take there.
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
        /// Whether a death has begun it.
        outage: bool,
    },
    /// Measure when the first batch of this worker is done: by then the change is in effect. `None`
    /// after a death.
    AwaitEffect(WorkerId, Option<ResizeRequest>),
    /// Count this, and answer the request that it is about.
    Report(Report),
}

/// What became of something, for statistics and answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Report {
    /// A hand-over begins, to this worker if it runs already.
    Begun(ResizeRequest, Option<WorkerId>),
    /// The share is in force.
    Completed(ChangeReport),
    /// A hand-over did not complete, or was taken back.
    NotKept {
        /// What was to be.
        change: ChangeReport,
        /// Whether it had completed.
        rolled_back: bool,
        /// Why.
        reason: Reason,
    },
    /// A change that had begun otherwise came to nothing.
    Aborted(ResizeRequest, ResizeRefused),
    /// A change was not begun.
    Refused(ResizeRequest, ResizeRefused),
    /// A standing worker serves in the place of one that died.
    FailedOver(Failover),
}
