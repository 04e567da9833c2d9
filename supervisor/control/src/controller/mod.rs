//! Control: one task a model, which starts its workers, replaces them, and never touches a request.
//!
//! ```text
//! orders (resize, stop) ──┐
//! facts of the pipeline ──┼─▶ Controller ─▶ policy's machine ─▶ actions ─▶ pipeline, processes
//! events of the workers ──┘        └─▶ report (for status)
//! ```
//!
//! The controllers have a thread of their own: starting a process takes milliseconds, in which the
//! reactor that serves clients must not stop.

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
mod standbys;
mod thread;

pub use changes::{Changes, Outcomes};
pub use context::Context;
pub use engine::{reference, spec as engine_spec};
pub use events::{Controller, ModelParts};
pub use groups::GroupLedger;
pub use loaded::{BatchLimit, warm_up};
pub use memory::MemoryLedger;
pub use planner::{
    DoorReport, ModelPlan, PlanReport, Planned, Planner, RecentReport, SeenReport, first_shares,
};
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
use shadowslice_config::ModelConfig;
use shadowslice_datapath::pipeline::Pipeline;
pub use shadowslice_policy::workers::{Cause, ResizeRefused};

/// Orders that may wait for a controller.
const ORDERS: usize = 16;

/// Worker events that may wait for a controller; a worker has fewer than eight in its life.
const EVENTS: usize = 256;

#[derive(Debug, Clone)]
pub struct Served {
    /// Its number; no two models ever have the same, nor do a model and its successor.
    pub id: usize,
    pub model: Arc<ModelConfig>,
    pub gpu: Arc<dyn GpuBackend>,
    pub pipeline: Arc<Pipeline>,
    pub report: watch::Receiver<ModelReport>,
    pub orders: mpsc::Sender<Order>,
    /// The report of the workers that are being started to take its place.
    pub successor: Option<watch::Receiver<ModelReport>>,
    /// The files that it was loaded from.
    pub files: Arc<LoadedFiles>,
}

#[derive(Debug)]
pub enum Order {
    Resize {
        share: Percent,
        /// The groups that a layout gives the model, where its share is a partition.
        groups: Option<Groups>,
        cause: Cause,
        /// Whether the share is held from then on, where a policy would change it again.
        hold: bool,
        reply: oneshot::Sender<Result<HandoverReport, ResizeRefused>>,
    },
    Hold {
        held: bool,
        /// Hears whether that is news.
        reply: oneshot::Sender<bool>,
    },
    /// Sends to `done` when no change of the share waits or is under way.
    AwaitChange { done: oneshot::Sender<()> },
    /// Go by this configuration from now on. What the workers were started with does not differ.
    Configure { model: Arc<ModelConfig> },
    /// End all workers, and then the controller. The pipeline is shut first.
    Stop,
}
