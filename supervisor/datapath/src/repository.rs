//! The model repository of the inference protocol: clients list, load and unload models. Ingress
//! depends only on this module, and not on the registry that executes the commands.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};

use crate::peer::{Guard, Peer};
use crate::phase::PhaseReceiver;

/// The longest time for which a command waits until the registry accepts it. The registry may be
/// busy with another command that starts models.
const TURN_TIMEOUT: Duration = Duration::from_secs(5);

/// A client's command to load or unload a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelCommand {
    /// A command to load the model and to read its files again. `config` is JSON with the
    /// configuration keys to override.
    Load { model: String, config: Option<String> },
    /// A command to unload the model after it has answered all accepted requests.
    Unload { model: String },
}

impl ModelCommand {
    /// Returns the name of the action and the name of the model.
    pub fn action_and_model(&self) -> (&'static str, &str) {
        match self {
            Self::Load { model, .. } => ("load", model),
            Self::Unload { model } => ("unload", model),
        }
    }
}

/// A command that waits for the registry.
#[derive(Debug)]
pub struct QueuedCommand {
    pub command: ModelCommand,
    pub by: Arc<Peer>,
    pub reply_tx: oneshot::Sender<Result<(), ModelCommandError>>,
}

/// The reason why a command was refused or failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ModelCommandError {
    #[error(
        "explicit model load / unload is not allowed; to allow it, set `model_control: explicit` in the configuration"
    )]
    NotAllowed,
    #[error(
        "this client may not load or unload models; `model_control` in the configuration lists the clients that may"
    )]
    Denied,
    #[error("failed to {0} '{1}': the configuration does not contain this model")]
    Unknown(&'static str, String),
    /// The client's command is malformed.
    #[error("{0}")]
    Invalid(String),
    /// The command failed. The model's previous state is unchanged.
    #[error("failed to load '{0}': {1}")]
    Failed(String, String),
    #[error("the server is busy with other models, or stopping; try again later")]
    Busy,
    /// The next supervisor is starting, and would not know about this change.
    #[error("another supervisor is taking over; try again in a few seconds")]
    Succession,
}

/// The state of a model as clients see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Availability {
    Ready,
    Loading,
    Unloading,
    Unavailable,
}

impl Availability {
    /// Returns the name in the protocol's index of models.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ready => "READY",
            Self::Loading => "LOADING",
            Self::Unloading => "UNLOADING",
            Self::Unavailable => "UNAVAILABLE",
        }
    }
}

/// A model as clients see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelListing {
    pub name: String,
    pub version: u32,
    pub state: Availability,
    pub reason: String,
}

type ListModels = Box<dyn Fn() -> Vec<ModelListing> + Send + Sync>;

/// The models as clients see them, and the channel for commands that change the models.
pub struct Repository {
    list: ListModels,
    guard: Guard,
    commands_tx: mpsc::Sender<QueuedCommand>,
    phase_rx: PhaseReceiver,
}

impl fmt::Debug for Repository {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Repository").field("commands_tx", &self.commands_tx).finish_non_exhaustive()
    }
}

impl Repository {
    /// Creates a repository. The repository sends the commands that `guard` permits to
    /// `commands_tx`. It refuses commands while models move between two supervisors.
    pub fn new(
        list: impl Fn() -> Vec<ModelListing> + Send + Sync + 'static,
        guard: Guard,
        commands_tx: mpsc::Sender<QueuedCommand>,
        phase_rx: PhaseReceiver,
    ) -> Self {
        Self { list: Box::new(list), guard, commands_tx, phase_rx }
    }

    pub fn list(&self) -> Vec<ModelListing> {
        (self.list)()
    }

    /// Executes a command, and waits until it has succeeded or failed.
    pub async fn execute(&self, by: Arc<Peer>, command: ModelCommand) -> Result<(), ModelCommandError> {
        if !self.guard.permits_any() {
            return Err(ModelCommandError::NotAllowed);
        }
        let (action, model) = command.action_and_model();
        if !self.guard.permits(&by, action, model) {
            return Err(ModelCommandError::Denied);
        }
        if self.phase_rx.borrow().is_upgrading() {
            return Err(ModelCommandError::Succession);
        }
        let (reply_tx, reply_rx) = oneshot::channel();
        let sent = tokio::time::timeout(
            TURN_TIMEOUT,
            self.commands_tx.send(QueuedCommand { command, by, reply_tx }),
        )
        .await;
        sent.map_err(|_| ModelCommandError::Busy)?.map_err(|_| ModelCommandError::Busy)?;
        // The registry limits the duration of a command. If the registry drops the command without
        // a reply, it has ended.
        reply_rx.await.unwrap_or(Err(ModelCommandError::Busy))
    }
}
