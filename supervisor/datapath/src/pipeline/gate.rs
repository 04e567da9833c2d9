//! Whether a model takes requests.

/// Between a worker's death and its successor it stays open, and requests wait.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Gate {
    /// No worker has served yet.
    Loading,
    /// Nor has one since a worker was killed.
    LoadingAgain,
    Open,
    /// For this reason.
    Shut(String),
}

impl Gate {
    /// Else why not.
    pub(crate) fn open(&self) -> Result<(), &str> {
        match self {
            Self::Open => Ok(()),
            Self::Loading | Self::LoadingAgain => Err("the model is being loaded"),
            Self::Shut(why) => Err(why),
        }
    }
}
