//! The control socket: one JSON document a line, a request and its answer, for `status`, `resize`
//! and the other commands to a running supervisor.

mod client;
mod server;

pub use client::{ControlClientError, ask};
pub use server::{Admin, AdminContext, ControlSocketError, Upgrade};

use serde::{Deserialize, Serialize};

use crate::status::HostStatus;
use shadowslice_control::controller::{HandoverReport, PlanReport};
use shadowslice_control::models::ReloadReport;

pub use shadowslice_config::CONTROL_SOCKET as SOCKET;

pub const MAX_REQUEST_BYTES: u64 = 64 * 1024;

pub const MAX_ANSWER_BYTES: u64 = 16 * 1024 * 1024;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum ControlRequest {
    Status,
    Resize {
        model: String,
        share_percent: u32,
    },
    /// Whether the policy may change the share.
    Hold {
        model: String,
        held: bool,
    },
    Plan,
    Reload,
    /// Have a model on this GPU, by its place in the configuration.
    Move {
        model: String,
        gpu: usize,
    },
    /// Another process of the binary that is installed now takes over.
    Upgrade,
    /// Whether the host, or one model, is to get no more requests, though it serves.
    Drain {
        model: Option<String>,
        drained: bool,
    },
}

impl ControlRequest {
    /// What is to change, and of which model (`*` for the host); `None` if nothing is.
    fn order(&self) -> Option<(&'static str, &str)> {
        match self {
            Self::Status | Self::Plan => None,
            Self::Resize { model, .. } => Some(("resize", model)),
            Self::Hold { model, held: true } => Some(("hold", model)),
            Self::Hold { model, held: false } => Some(("release", model)),
            Self::Reload => Some(("reload", "*")),
            Self::Move { model, .. } => Some(("move", model)),
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
    Handover {
        report: HandoverReport,
        /// Whether the share is held from now on, as a policy would change it again.
        held: bool,
    },
    Held {
        held: bool,
        /// Whether this changed it.
        news: bool,
    },
    Drained {
        drained: bool,
        /// Whether this changed it.
        news: bool,
    },
    Placed {
        gpu: usize,
        /// Whether this changed it.
        news: bool,
    },
    Plan(PlanReport),
    Reloaded(ReloadReport),
    Upgraded {
        /// The process that serves now.
        pid: u32,
    },
    /// The configuration's faults, each a line.
    Faulty(String),
    /// The share is in force already.
    Unchanged {
        why: String,
        held: bool,
    },
    Refused(String),
}
