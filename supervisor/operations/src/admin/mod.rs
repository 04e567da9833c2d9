//! The control socket: one JSON document a line, a request and its answer, for `status`, `resize`
//! and the other commands to a running supervisor.

mod client;
mod server;

pub use client::{AskError, ask};
pub use server::{Admin, BindError, Reach};

use serde::{Deserialize, Serialize};

use crate::status::Status;
use shadowslice_control::controller::{HandoverReport, PlanReport};
use shadowslice_control::models::ReloadReport;

/// The socket's name in the run directory.
pub const SOCKET: &str = "control.sock";

/// The longest request, in bytes.
pub const MAX_REQUEST_BYTES: u64 = 64 * 1024;

/// The longest answer, in bytes.
pub const MAX_ANSWER_BYTES: u64 = 16 * 1024 * 1024;

/// A command to a running supervisor.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Ask {
    /// How everything stands.
    Status,
    /// Another share for a model.
    Resize {
        /// The model.
        model: String,
        /// The share, in percent.
        share_percent: u32,
    },
    /// Whether the policy may change a model's share.
    Hold {
        /// The model.
        model: String,
        /// Whether it is held from now on.
        held: bool,
    },
    /// The changes that the policy would make now.
    Plan,
    /// That the configuration's file is read again.
    Reload,
}

/// The supervisor's answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// How everything stands.
    Status(Status),
    /// How a hand-over went.
    Handover {
        /// How.
        report: HandoverReport,
        /// Whether the share is held from now on, as a policy would change it again.
        held: bool,
    },
    /// Whether the share is held now, and whether that is news.
    Held {
        /// Whether it is held.
        held: bool,
        /// Whether it was not before, or the other way round.
        news: bool,
    },
    /// The changes that the policy would make now.
    Plan(PlanReport),
    /// The result of reading the configuration again.
    Reloaded(ReloadReport),
    /// The configuration has faults, each a line.
    Faulty(String),
    /// The share is in force already.
    Unchanged {
        /// So it says.
        why: String,
        /// Whether it is held from now on, as a policy would change it again.
        held: bool,
    },
    /// It was not done, and why.
    Refused(String),
}
