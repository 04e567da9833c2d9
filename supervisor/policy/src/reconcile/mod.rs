//! The reconciliation of one model: from its desired state and its observed state to the next step.
//!
//! Commands, reloads, changed files, the placement on GPUs and upgrades only change the desired state
//! (see [`Goal`]). A driver observes the model, performs the step that [`plan`] returns, and observes
//! again. If `plan` returns nothing, the driver waits for an event.
//!
//! ```text
//!                       Start                          Start
//!   nothing serves ───────────────▶ an instance ◀──────────────┐
//!      ▲   ▲                         │  │  ▲                    │ beside it, if the change
//!      │   └────────── Retire ───────┘  │  │ Promote            │ needs new workers
//!      │                                │  └──────────── a successor
//!      │ Retire                   Relay │                   │  ▲
//!      │                                ▼                   │  │ Start
//!      └─────────────────── another supervisor serves ──────┼──┘
//!                                                           └─▶ Discard, if it failed or
//!   Configure, Resize: changes in place                         is no longer wanted
//!   Confirm, Refuse: answer the commands that wait for the desired state
//! ```
//!
//! An instance is a request queue with its workers. A model has at most two instances that accept work:
//! the current one, which gets all requests, and its successor, which only starts.

mod goal;

pub use goal::{Goal, Settled};

/// The place where a model should be served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    /// Workers of this supervisor serve the model.
    Served,
    /// Nobody serves the model.
    Unloaded,
    /// Another supervisor serves the model.
    Relayed,
}

/// The observed state of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Observed {
    /// The part that gets the requests.
    pub current: Current,
    /// The instance that starts, to take the current one's place.
    pub successor: Option<InstanceView>,
    /// The progress of the current instance's share towards the desired share.
    pub share: ShareProgress,
    /// True if workers of retired instances still exist.
    pub exiting: bool,
    /// True if the commands that led to the desired state have been answered.
    pub settled: bool,
    /// The error of the last step towards the desired state. The desired state must change before
    /// another step is tried.
    pub fault: Option<String>,
}

/// The part that gets a model's requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Current {
    /// Requests are refused.
    Nothing,
    /// Another supervisor serves.
    Relay {
        /// True if that supervisor has died, so that requests can only wait for a worker here.
        is_lost: bool,
    },
    /// An instance of this supervisor.
    Instance(InstanceView),
}

/// An instance as seen by the reconciliation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstanceView {
    /// The difference between its specification and the desired one.
    pub difference: SpecDifference,
    /// The progress of its first start.
    pub health: Health,
}

/// The change that an instance needs to become the desired one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpecDifference {
    /// The instance is the desired one.
    None,
    /// Its settings change while its workers continue.
    InPlace,
    /// Another instance must replace it.
    NewWorkers,
}

/// The progress of an instance's start.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Health {
    /// No worker has served yet.
    Starting,
    /// A worker serves, or its replacement starts.
    Serving,
    /// No worker serves, for this reason.
    Failed(String),
}

/// The progress of a share towards the desired share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShareProgress {
    /// The desired share is in force, or any share is allowed.
    Reached,
    /// Another share is in force, and no change to the desired one has been requested.
    Differs,
    /// A change is in progress.
    Changing,
}

/// A step towards the desired state. Every step is short: a driver never waits for a worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Creates an instance with the desired specification. It becomes the current one if nothing
    /// serves, and otherwise the successor.
    Start,
    /// Gives the current instance its new settings.
    Configure,
    /// Gives the successor its new settings.
    ConfigureSuccessor,
    /// Requests the desired share for the current instance.
    Resize,
    /// Sends the requests to the successor, and retires what served before.
    Promote,
    /// Retires the successor.
    Discard,
    /// Retires the current instance. Nothing serves then.
    Retire,
    /// Sends the requests to the other supervisor, and retires the current instance.
    Relay,
    /// Answers the commands that the desired state is reached.
    Confirm,
    /// Answers the commands that the desired state cannot be reached, for this reason. The state in
    /// which the current instance was last confirmed becomes the desired one.
    Refuse(String),
}

/// Returns the next step, or `None` if the driver must wait for an event.
///
/// * The current instance serves until a successor does. If the successor fails, the current instance
///   stays.
/// * A successor that has become superfluous ends at once, even if it hangs.
/// * A share is only changed before the commands have been answered. Afterwards a sharing policy and
///   operators may change it.
pub fn plan(desired: Presence, observed: &Observed) -> Option<Step> {
    if let Some(why) = &observed.fault {
        return (!observed.settled).then(|| Step::Refuse(why.clone()));
    }
    match desired {
        Presence::Served => serve(observed),
        Presence::Unloaded => unload(observed),
        Presence::Relayed => relay(observed),
    }
}

fn serve(observed: &Observed) -> Option<Step> {
    let Some(successor) = &observed.successor else { return serve_with_current(observed) };
    let relay_is_lost = match observed.current {
        Current::Relay { is_lost } => Some(is_lost),
        Current::Nothing | Current::Instance(_) => None,
    };
    match (successor.difference, &successor.health, relay_is_lost) {
        (SpecDifference::NewWorkers, _, _) => Some(Step::Discard),
        (SpecDifference::InPlace, _, _) => Some(Step::ConfigureSuccessor),
        (SpecDifference::None, Health::Serving, _) => Some(Step::Promote),
        // Without another supervisor, requests wait for the workers here. If these fail, the model's
        // state says why.
        (SpecDifference::None, Health::Failed(_), Some(_)) | (SpecDifference::None, _, Some(true)) => {
            Some(Step::Promote)
        }
        (SpecDifference::None, Health::Starting, _) => None,
        (SpecDifference::None, Health::Failed(why), None) => Some(Step::Refuse(why.clone())),
    }
}

fn serve_with_current(observed: &Observed) -> Option<Step> {
    let Current::Instance(current) = &observed.current else { return Some(Step::Start) };
    match (current.difference, &current.health, observed.share) {
        (SpecDifference::NewWorkers, _, _) => Some(Step::Start),
        (SpecDifference::InPlace, _, _) => Some(Step::Configure),
        (SpecDifference::None, _, _) if observed.settled => None,
        (SpecDifference::None, Health::Failed(why), _) => Some(Step::Refuse(why.clone())),
        (SpecDifference::None, Health::Starting, _) => None,
        (SpecDifference::None, Health::Serving, ShareProgress::Differs) => Some(Step::Resize),
        (SpecDifference::None, Health::Serving, ShareProgress::Changing) => None,
        (SpecDifference::None, Health::Serving, ShareProgress::Reached) => Some(Step::Confirm),
    }
}

fn unload(observed: &Observed) -> Option<Step> {
    if observed.successor.is_some() {
        return Some(Step::Discard);
    }
    match observed.current {
        Current::Nothing => (!observed.settled).then_some(Step::Confirm),
        Current::Relay { .. } | Current::Instance(_) => Some(Step::Retire),
    }
}

/// Returns the next step of a model that moves to another supervisor. The model has moved when its
/// workers here have exited, so that their memory is free.
fn relay(observed: &Observed) -> Option<Step> {
    if observed.successor.is_some() {
        return Some(Step::Discard);
    }
    match observed.current {
        Current::Instance(_) => Some(Step::Relay),
        Current::Nothing | Current::Relay { .. } => {
            (!observed.settled && !observed.exiting).then_some(Step::Confirm)
        }
    }
}
