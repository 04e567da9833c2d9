//! Control: one task a model, which starts its workers, replaces them, and never touches a request.
//!
//! ```text
//! orders (resize, stop) ──┐
//! facts of the pipeline ──┼─▶ Controller ─▶ policy's hand-over machine ─▶ actions ─▶ pipeline, workers
//! events of the workers ──┘        └─▶ standing (for status)
//! ```
//!
//! The controllers have a thread of their own: starting a process takes milliseconds, in which the
//! reactor that serves clients must not stop.

mod changes;
mod engine;
mod events;
mod groups;
mod in_process;
mod launch;
mod loaded;
mod memory;
mod outcome;
mod planner;
mod primary;
mod publish;
mod reports;
mod resize;
mod standby;
mod swap;
mod takeover;
mod thread;

pub use changes::{Cause, Changes, Outcomes};
pub use engine::spec as engine_spec;
pub use events::{Context, Controller, Inbox, Parts};
pub use groups::GroupLedger;
pub use loaded::warm_up;
pub use memory::MemoryLedger;
pub use planner::{
    DoorReport, ModelPlan, PlanReport, Planned, PlannedModel, Planner, SeenReport, first_shares,
};
pub use reports::{BootMs, HandoverReport, Handovers, ModelReport, ModelState, WorkerReport};
pub use thread::{ControlThread, ControllerTask};

use std::sync::Arc;

use shadowslice_shared::units::{Moment, Percent};
use tokio::sync::oneshot;

use primary::WRONG_AT_A_SHARE;
use shadowslice_config::Model;

/// Orders that may wait for a controller.
pub const ORDERS: usize = 16;

/// Worker events that may wait for a controller; a worker has fewer than eight in its life.
pub const EVENTS: usize = 256;

/// What a controller is told to do.
#[derive(Debug)]
pub enum Order {
    /// Give the model another share.
    Resize {
        /// The share.
        share: Percent,
        /// Why it is wanted.
        cause: Cause,
        /// Whether the share is held from then on, where a policy would change it again.
        hold: bool,
        /// When the load changed, if the order answers a change of the load.
        onset: Option<Moment>,
        /// Hears how it went.
        reply: oneshot::Sender<Result<HandoverReport, ResizeRefused>>,
    },
    /// Keep the policy from changing the share, or let it.
    Hold {
        /// Which of the two.
        held: bool,
        /// Hears whether that is news.
        reply: oneshot::Sender<bool>,
    },
    /// Go by this configuration from now on: the same model, with other bounds on its share, another priority, and
    /// other ways of handing over and standing by. What its workers were started with does not differ.
    Configure {
        /// The configuration.
        model: Arc<Model>,
    },
    /// End all workers, and then the controller. The pipeline is shut first.
    Stop,
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
