//! Rollouts: a new version of a model starts beside the released one, and takes over step by step.
//!
//! ```text
//! command, reload, new folder ─▶ Registry::begin_rollout ─▶ an entry for the new version
//!                                                        └─▶ RolloutDriver
//!   figures of both versions ─▶ policy::rollout::next ─▶ stage ─▶ share of the new version,
//!                                                              mirror and canary of the router
//! ```

mod driver;
mod figures;
mod folders;
mod start;
mod transitions;

pub use driver::stage_name;
pub(super) use folders::{FolderWatch, at_once};

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use shadowslice_config::RolloutConfig;
use shadowslice_datapath::versions::{MirrorCounts, MirrorLedger};
use shadowslice_policy::rollout::RolloutStage;
use tokio::sync::{mpsc, oneshot};

/// The maximum number of commands that wait for a rollout.
const MAX_QUEUED_COMMANDS: usize = 8;

/// A rollout in progress, as commands and the status see it.
#[derive(Debug, Clone)]
pub struct RolloutHandle {
    /// The number of the new version.
    pub candidate: u32,
    /// The number of the version that was released before.
    pub former: u32,
    pub stage: RolloutStage,
    pub stage_since: SystemTime,
    /// The time until which the former version is kept. `None` until the new one is released.
    pub kept_until: Option<SystemTime>,
    pub config: Arc<RolloutConfig>,
    ledger: Arc<MirrorLedger>,
    commands_tx: mpsc::Sender<QueuedRolloutCommand>,
}

impl RolloutHandle {
    pub fn mirror(&self) -> MirrorCounts {
        self.ledger.counts()
    }
}

/// The end of a rollout.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RolloutOutcome {
    pub candidate: u32,
    pub former: u32,
    pub at: SystemTime,
    /// The reason why the new version was rolled back. `None` if it is released.
    pub why: Option<String>,
    pub mirror: MirrorCounts,
}

/// A model's rollout in progress, and its last one.
#[derive(Debug, Clone)]
pub struct ModelRollout {
    /// The name that clients use.
    pub model: String,
    pub active: Option<RolloutHandle>,
    pub last: Option<RolloutOutcome>,
}

/// A new version of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct RolloutRequest {
    pub model: String,
    pub path: PathBuf,
    /// The keys of `rollout` that differ from the configuration, as JSON. `None` if nothing differs.
    pub changes: Option<String>,
}

/// The start of a rollout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BegunRollout {
    pub candidate: u32,
    pub former: u32,
}

/// A command to a rollout in progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RolloutCommand {
    /// Ends the stage.
    Promote,
    /// Makes the former version answer all requests again.
    RollBack,
}

/// The outcome of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CommandedRollout {
    /// The number of the version that the command has promoted or has brought back.
    pub version: u32,
    pub stage: RolloutStage,
    /// The time until requests reached the version.
    pub took: Duration,
}

#[derive(Debug)]
struct QueuedRolloutCommand {
    command: RolloutCommand,
    reply_tx: oneshot::Sender<Result<CommandedRollout, String>>,
}
