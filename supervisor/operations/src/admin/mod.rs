//! The control socket, through which `status`, `resize` and other commands reach a running
//! supervisor. Each request and each reply is one line of JSON.

mod client;
mod output;
mod server;
mod sleep;

pub use client::{ControlClientError, send};
pub use output::show;
pub use server::{Admin, AdminContext, ControlSocketError, Upgrade};

use serde::{Deserialize, Serialize};

use crate::plan::PlanReport;
use crate::status::{HostStatus, RolloutStatus, SeenPhase};
use crate::top::TopReply;
use shadowslice_control::controller::HandoverReport;
use shadowslice_control::models::ReloadReport;

pub use shadowslice_config::CONTROL_SOCKET as SOCKET;

/// The largest request, in bytes.
pub const MAX_REQUEST_BYTES: u64 = 64 * 1024;

/// The largest reply, in bytes.
pub const MAX_REPLY_BYTES: u64 = 16 * 1024 * 1024;

/// A request that a command sends to the supervisor over the control socket.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ControlRequest {
    Status,
    /// Returns the data that `shadowslice top` shows.
    Top,
    Resize {
        model: String,
        share_percent: u32,
    },
    /// Prevents the policy from changing the share, or allows changes again.
    Hold {
        model: String,
        held: bool,
    },
    /// Makes a model sleep, or wakes it.
    Sleep {
        model: String,
        asleep: bool,
    },
    Plan,
    Reload,
    /// Moves a model to the GPU with this index in the configuration.
    Move {
        model: String,
        gpu: usize,
    },
    /// Starts a new version of a model beside the released one.
    Rollout {
        model: String,
        /// The absolute path of the new version.
        path: std::path::PathBuf,
        /// The keys of `rollout` that differ from the configuration, as JSON.
        changes: Option<String>,
    },
    /// Waits until the rollout of this version has another phase than `seen`, and returns its state.
    FollowRollout {
        model: String,
        candidate: u32,
        seen: Option<SeenPhase>,
    },
    /// Ends the stage of a model's rollout.
    Promote {
        model: String,
    },
    /// Makes the former version of a model answer all requests again.
    Rollback {
        model: String,
    },
    /// Starts the installed binary, which then takes over from this process.
    Upgrade,
    /// Drains the host or one model, or ends the drain. A drained model is reported as not ready.
    Drain {
        model: Option<String>,
        drained: bool,
    },
}

impl ControlRequest {
    /// Returns the name of a request that changes something, and its model. The model is `*` for a
    /// request that concerns the host. Returns `None` for a request that only reads.
    fn command(&self) -> Option<(&'static str, &str)> {
        match self {
            Self::Status | Self::Top | Self::Plan | Self::FollowRollout { .. } => None,
            Self::Resize { model, .. } => Some(("resize", model)),
            Self::Hold { model, held: true } => Some(("hold", model)),
            Self::Hold { model, held: false } => Some(("release", model)),
            Self::Sleep { model, asleep } => Some((if *asleep { "sleep" } else { "wake" }, model)),
            Self::Reload => Some(("reload", "*")),
            Self::Move { model, .. } => Some(("move", model)),
            Self::Rollout { model, .. } => Some(("rollout", model)),
            Self::Promote { model } => Some(("promote", model)),
            Self::Rollback { model } => Some(("rollback", model)),
            Self::Upgrade => Some(("upgrade", "*")),
            Self::Drain { model, drained } => {
                Some((if *drained { "drain" } else { "undrain" }, model.as_deref().unwrap_or("*")))
            }
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ControlReply {
    Status(HostStatus),
    Top(TopReply),
    Handover {
        report: HandoverReport,
        /// True if the share is now held, which means that the policy does not change the share.
        held: bool,
    },
    Held {
        held: bool,
        /// True if the request changed `held`.
        news: bool,
    },
    Drained {
        drained: bool,
        /// True if the request changed `drained`.
        news: bool,
    },
    Placed {
        gpu: usize,
        /// True if the request changed `gpu`.
        news: bool,
    },
    /// The model sleeps or is awake, as requested.
    Slept {
        asleep: bool,
        /// True if the request changed this.
        news: bool,
        /// The time that the worker took, in ms. `None` if it is unknown.
        took_ms: Option<f64>,
    },
    Plan(PlanReport),
    Reloaded(ReloadReport),
    /// A new version starts.
    RolloutBegun {
        candidate: u32,
        former: u32,
    },
    /// The state of a rollout.
    Rollout(RolloutStatus),
    /// A rollout has followed a command.
    RolloutChanged {
        /// The number of the version that was promoted or brought back.
        version: u32,
        /// The name of the stage.
        stage: String,
        /// The time until requests reached the version, in ms.
        took_ms: f64,
    },
    Upgraded {
        /// The process id of the supervisor that has taken over.
        pid: u32,
    },
    /// The errors in the configuration, one per line.
    Faulty(String),
    /// The model already had the requested share.
    Unchanged {
        why: String,
        held: bool,
    },
    Refused(String),
}
