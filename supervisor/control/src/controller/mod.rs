//! The controllers. Each model has a controller, which starts and replaces the model's workers. A
//! controller handles no requests.
//!
//! ```text
//! orders (resize, stop) ──┐
//! events of the lanes ────┼─▶ Controller ─▶ state machine ─▶ actions ─▶ pipeline, processes
//! events of the workers ──┘        └─▶ report (for status)
//! ```
//!
//! The controllers run on a separate thread, because the start of a process blocks for milliseconds. The
//! data path must not be blocked for that time.

mod changes;
mod context;
mod engine;
mod events;
mod groups;
mod launch;
mod loaded;
mod memory;
mod outcome;
mod perform;
mod planner;
mod publish;
mod reported;
mod reports;
mod room;
mod shared;
mod slab_sizes;
mod standbys;
mod thread;
mod worker_events;

pub use changes::{Changes, Outcomes};
pub use context::Context;
pub use engine::{reference, spec as engine_spec};
pub use events::{Controller, ModelParts};
pub use groups::GroupLedger;
pub use loaded::{BatchLimit, warm_up};
pub use memory::MemoryLedger;
pub use planner::{Explained, ModelDecision, NotOrdered, Planned, Planner, first_shares};
pub use reported::{
    ChangeCause, ChangeOutcome, Mechanism, ReportedPhase, ReportedRole, ReportedState, ReportedVerdict,
};
pub use reports::{
    HandoverReport, Handovers, ModelReport, ModelState, NextStart, WaitReason, Warming, WorkerMemory,
    WorkerReport,
};
pub use thread::{ControlThread, ControllerTask};

use std::sync::Arc;

use shadowslice_shared::groups::Groups;
use shadowslice_shared::units::Percent;
use tokio::sync::{mpsc, oneshot, watch};

use crate::backend::GpuBackend;
use crate::process::LoadedFiles;
use serde::{Deserialize, Serialize};
use shadowslice_config::ModelConfig;
use shadowslice_datapath::pipeline::Pipeline;
pub use shadowslice_policy::workers::{Cause, ResizeRefused};

/// The largest number of orders in a controller's queue.
const MAX_QUEUED_ORDERS: usize = 16;

/// The largest number of worker events in a controller's queue. A worker causes fewer than eight events
/// in its life.
const MAX_QUEUED_EVENTS: usize = 256;

/// A model with its controller.
#[derive(Debug, Clone)]
pub struct Served {
    /// The unique number of this controller. A model and its successor have different numbers.
    pub id: usize,
    pub model: Arc<ModelConfig>,
    pub gpu: Arc<dyn GpuBackend>,
    pub pipeline: Arc<Pipeline>,
    pub report: watch::Receiver<ModelReport>,
    pub orders: mpsc::Sender<Order>,
    /// The report of the workers that are starting to replace this model's workers.
    pub successor: Option<watch::Receiver<ModelReport>>,
    /// The files from which the model was loaded.
    pub files: Arc<LoadedFiles>,
    pub role: VersionRole,
}

/// The part that an instance has in the service of its model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VersionRole {
    /// The instance answers requests that name no version.
    #[default]
    Released,
    /// The instance serves a new version in a rollout.
    Candidate,
    /// The instance served before, and is kept for a rollback.
    Former,
    /// The instance answers requests that name its version.
    Loaded,
}

impl VersionRole {
    pub fn is_released(self) -> bool {
        self == Self::Released
    }
}

impl Served {
    /// Returns the name that operators see: the model's name, with the version unless it is released.
    pub fn shown_name(&self) -> String {
        shown_name(&self.model, self.role)
    }
}

/// Returns the name that operators see for a version of a model.
pub fn shown_name(model: &ModelConfig, role: VersionRole) -> String {
    match role {
        VersionRole::Released => model.served_name().to_owned(),
        _ => format!("{}:{}", model.served_name(), model.version.number),
    }
}

/// An order to a controller.
#[derive(Debug)]
pub enum Order {
    /// Changes the share.
    Resize {
        share: Percent,
        /// The groups that a layout gives the model, if its share is a partition.
        groups: Option<Groups>,
        cause: Cause,
        /// True if the share is held afterwards, so that the policy does not change it.
        hold: bool,
        reply: oneshot::Sender<Result<HandoverReport, ResizeRefused>>,
    },
    /// Prevents the policy from changing the share, or allows changes again.
    Hold {
        held: bool,
        /// The sender for the reply, which is true if the order changed `held`.
        reply: oneshot::Sender<bool>,
    },
    /// Sends to `done` when no change of the share waits or is in progress.
    AwaitChange { done: oneshot::Sender<()> },
    /// Applies this configuration. It does not differ in settings that workers get when they start.
    Configure { model: Arc<ModelConfig> },
    /// Stops all workers and then the controller. The pipeline must have been shut before.
    Stop,
}
