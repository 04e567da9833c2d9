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
mod reports;
mod room;
mod thread;

pub use changes::{Changes, Outcomes};
pub use engine::spec as engine_spec;
pub use events::{Context, Controller};
pub use groups::GroupLedger;
pub use loaded::warm_up;
pub use memory::MemoryLedger;
pub use planner::{DoorReport, ModelPlan, PlanReport, Planned, Planner, SeenReport, first_shares};
pub use reports::{HandoverReport, Handovers, ModelReport, ModelState, WorkerMemory, WorkerReport};
pub use thread::{ControlThread, ControllerTask};

use std::sync::Arc;

use shadowslice_shared::units::Percent;
use tokio::sync::{mpsc, oneshot, watch};

use crate::backend::GpuBackend;
use shadowslice_config::Model;
use shadowslice_datapath::pipeline::Pipeline;
pub use shadowslice_policy::workers::{Cause, ResizeRefused};

/// Orders that may wait for a controller.
const ORDERS: usize = 16;

/// Worker events that may wait for a controller; a worker has fewer than eight in its life.
const EVENTS: usize = 256;

/// A model that runs, as others reach it.
#[derive(Debug, Clone)]
pub struct Served {
    /// Its number; no two models ever have the same, nor do a model and its successor.
    pub id: usize,
    /// Its configuration.
    pub model: Arc<Model>,
    /// Its GPU.
    pub gpu: Arc<dyn GpuBackend>,
    /// Its pipeline.
    pub pipeline: Arc<Pipeline>,
    /// Its controller's report.
    pub report: watch::Receiver<ModelReport>,
    /// Its controller.
    pub orders: mpsc::Sender<Order>,
    /// The report of the workers that are being started to take its place.
    pub successor: Option<watch::Receiver<ModelReport>>,
}

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
