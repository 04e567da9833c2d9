//! The gate of a model decides whether the model accepts requests.

/// The state of a gate. An open gate stays open after a worker's death, and requests wait until the
/// next worker has started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Gate {
    /// No worker has been ready yet.
    Loading,
    /// No worker has been ready yet, and at least one worker was killed. Clients still receive the
    /// error that the model is being loaded, but the host's readiness no longer waits for the
    /// model.
    LoadingAgain,
    Open,
    /// The model accepts no requests, for this reason.
    Shut(String),
}

impl Gate {
    /// Returns `Ok` if the gate is open. Otherwise returns the reason why it is closed.
    pub(crate) fn open(&self) -> Result<(), &str> {
        match self {
            Self::Open => Ok(()),
            Self::Loading | Self::LoadingAgain => Err("the model is being loaded"),
            Self::Shut(why) => Err(why),
        }
    }
}
