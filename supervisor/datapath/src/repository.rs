//! The protocol's model repository: clients list, load and unload models. Ingress uses this module
//! only, and does not know the registry behind it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};

use crate::peer::{Guard, Peer};

/// How long a command may wait for its turn: another command may be starting models.
const TURN_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelCommand {
    /// The model is to serve, with its files read anew; `config` has the keys of its configuration
    /// that are to differ, as JSON.
    Load { model: String, config: Option<String> },
    /// The model is to answer the requests that it accepted, and end.
    Unload { model: String },
}

impl ModelCommand {
    /// What is to be done to which model.
    pub fn action_and_model(&self) -> (&'static str, &str) {
        match self {
            Self::Load { model, .. } => ("load", model),
            Self::Unload { model } => ("unload", model),
        }
    }
}

#[derive(Debug)]
pub struct QueuedCommand {
    pub command: ModelCommand,
    pub by: Arc<Peer>,
    pub reply_tx: oneshot::Sender<Result<(), ModelCommandError>>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ModelCommandError {
    #[error(
        "explicit model load / unload is not allowed; `model_control: explicit` in the configuration allows it"
    )]
    NotAllowed,
    #[error("this client may not load or unload models; `model_control` in the configuration names who may")]
    Denied,
    #[error("failed to {0} '{1}': the configuration names no such model")]
    Unknown(&'static str, String),
    /// The client's command is malformed.
    #[error("{0}")]
    Invalid(String),
    /// The command was tried and failed. The earlier state is still in force.
    #[error("failed to load '{0}': {1}")]
    Failed(String, String),
    #[error("the server is busy with other models, or stopping; try again later")]
    Busy,
    /// What is changed now would not be known there.
    #[error("another supervisor is about to take over; try again in some seconds")]
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

pub struct Repository {
    list: ListModels,
    guard: Guard,
    commands_tx: mpsc::Sender<QueuedCommand>,
    successor_rx: watch::Receiver<bool>,
}

impl fmt::Debug for Repository {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Repository").field("wishes", &self.commands_tx).finish_non_exhaustive()
    }
}

impl Repository {
    /// Commands of those whom `guard` lets go to `commands_tx`, unless the next supervisor is `successor_rx`.
    pub fn new(
        list: impl Fn() -> Vec<ModelListing> + Send + Sync + 'static,
        guard: Guard,
        commands_tx: mpsc::Sender<QueuedCommand>,
        successor_rx: watch::Receiver<bool>,
    ) -> Self {
        Self { list: Box::new(list), guard, commands_tx, successor_rx }
    }

    pub fn list(&self) -> Vec<ModelListing> {
        (self.list)()
    }

    /// Waits until it is so, or cannot be.
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
