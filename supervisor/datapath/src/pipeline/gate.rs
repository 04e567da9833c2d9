//! The gate of a model, which decides whether the model takes requests.

/// The state of a gate. It stays open between a worker's death and the next worker's start, while
/// requests wait.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Gate {
    /// No worker has served yet.
    Loading,
    /// No worker has served yet, and one was killed.
    LoadingAgain,
    Open,
    /// The model takes no requests, for this reason.
    Shut(String),
}

impl Gate {
    /// Returns `Ok` if the gate is open, or else the reason why it is not.
    pub(crate) fn open(&self) -> Result<(), &str> {
        match self {
            Self::Open => Ok(()),
            Self::Loading | Self::LoadingAgain => Err("the model is being loaded"),
            Self::Shut(why) => Err(why),
        }
    }
}
