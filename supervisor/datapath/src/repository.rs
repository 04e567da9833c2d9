//! The protocol's model repository: clients list, load and unload models. Ingress uses this module
//! only, and does not know the registry behind it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};

use crate::peer::{Guard, Peer};

/// How long a command may wait for its turn: another command may be starting models.
const TURN_WITHIN: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wish {
    /// The model is to serve, with its files read anew; `config` has the keys of its configuration
    /// that are to differ, as JSON.
    Load { model: String, config: Option<String> },
    /// The model is to answer the requests that it accepted, and end.
    Unload { model: String },
}

impl Wish {
    /// What is to be done to which model.
    pub fn named(&self) -> (&'static str, &str) {
        match self {
            Self::Load { model, .. } => ("load", model),
            Self::Unload { model } => ("unload", model),
        }
    }
}

#[derive(Debug)]
pub struct Asked {
    pub wish: Wish,
    pub by: Arc<Peer>,
    pub reply: oneshot::Sender<Result<(), WishRefused>>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WishRefused {
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
    /// What is changed now would not be known there.
    #[error("another supervisor is taking over; try again in a few seconds")]
    Succession,
}

/// A model as clients see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    pub name: String,
    /// `READY`, `LOADING`, `UNLOADING` or `UNAVAILABLE`.
    pub state: &'static str,
    pub reason: String,
}

type List = Box<dyn Fn() -> Vec<Listed> + Send + Sync>;

pub struct Repository {
    list: List,
    guard: Guard,
    wishes: mpsc::Sender<Asked>,
    rising: watch::Receiver<bool>,
}

impl fmt::Debug for Repository {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Repository").field("wishes", &self.wishes).finish_non_exhaustive()
    }
}

impl Repository {
    /// Commands of those whom `guard` lets go to `wishes`, unless the next supervisor is `rising`.
    pub fn new(
        list: impl Fn() -> Vec<Listed> + Send + Sync + 'static,
        guard: Guard,
        wishes: mpsc::Sender<Asked>,
        rising: watch::Receiver<bool>,
    ) -> Self {
        Self { list: Box::new(list), guard, wishes, rising }
    }

    pub fn list(&self) -> Vec<Listed> {
        (self.list)()
    }

    /// Waits until it is so, or cannot be.
    pub async fn wish(&self, by: Arc<Peer>, wish: Wish) -> Result<(), WishRefused> {
        if !self.guard.is_open() {
            return Err(WishRefused::NotAllowed);
        }
        let (action, model) = wish.named();
        if !self.guard.lets(&by, action, model) {
            return Err(WishRefused::Denied);
        }
        if *self.rising.borrow() {
            return Err(WishRefused::Succession);
        }
        let (reply, outcome) = oneshot::channel();
        let sent = tokio::time::timeout(TURN_WITHIN, self.wishes.send(Asked { wish, by, reply })).await;
        sent.map_err(|_| WishRefused::Busy)?.map_err(|_| WishRefused::Busy)?;
        // The registry bounds the time of a command; if it sends no reply, it has ended.
        outcome.await.unwrap_or(Err(WishRefused::Busy))
    }
}
