//! The protocol's model repository: clients list, load and unload models. Ingress uses only this
//! module, and does not know the registry behind it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};

use crate::peer::{Guard, Peer};

/// The longest time that a command waits for its turn, because another command may be starting
/// models.
const TURN_TIMEOUT: Duration = Duration::from_secs(5);

/// A client's command to load or unload a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelCommand {
    /// Load the model and read its files again. `config` has the keys of its configuration to
    /// override, as JSON.
    Load { model: String, config: Option<String> },
    /// Unload the model after it has answered the requests that it accepted.
    Unload { model: String },
}

impl ModelCommand {
    /// Returns the name of the action, and the model.
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

/// The reason why a command was not carried out.
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
    /// The command was tried and failed. The earlier state is still in force.
    #[error("failed to load '{0}': {1}")]
    Failed(String, String),
    #[error("the server is busy with other models, or stopping; try again later")]
    Busy,
    /// The next supervisor is starting, and would not know of a change that is made now.
    #[error("another supervisor is taking over; try again in a few seconds")]
    Succession,
}

/// A model as clients see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelListing {
    pub name: String,
    /// `READY`, `LOADING`, `UNLOADING` or `UNAVAILABLE`.
    pub state: &'static str,
    pub reason: String,
}

type ListModels = Box<dyn Fn() -> Vec<ModelListing> + Send + Sync>;

/// The models as clients see them, and the commands that change them.
pub struct Repository {
    list: ListModels,
    guard: Guard,
    commands_tx: mpsc::Sender<QueuedCommand>,
    successor_rx: watch::Receiver<bool>,
}

impl fmt::Debug for Repository {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Repository").field("commands_tx", &self.commands_tx).finish_non_exhaustive()
    }
}

impl Repository {
    /// Creates a repository. It sends the commands that `guard` permits to `commands_tx`, unless
    /// `successor_rx` says that the next supervisor is starting.
    pub fn new(
        list: impl Fn() -> Vec<ModelListing> + Send + Sync + 'static,
        guard: Guard,
        commands_tx: mpsc::Sender<QueuedCommand>,
        successor_rx: watch::Receiver<bool>,
    ) -> Self {
        Self { list: Box::new(list), guard, commands_tx, successor_rx }
    }

    /// Returns the models.
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
        if *self.successor_rx.borrow() {
            return Err(ModelCommandError::Succession);
        }
        let (reply_tx, reply_rx) = oneshot::channel();
        let sent = tokio::time::timeout(
            TURN_TIMEOUT,
            self.commands_tx.send(QueuedCommand { command, by, reply_tx }),
        )
        .await;
        sent.map_err(|_| ModelCommandError::Busy)?.map_err(|_| ModelCommandError::Busy)?;
        // The registry bounds the time of a command; if it sends no reply, it has ended.
        reply_rx.await.unwrap_or(Err(ModelCommandError::Busy))
    }
}
