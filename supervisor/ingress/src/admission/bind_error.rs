use std::io;

use shadowslice_datapath::peer::UnknownAccount;

/// An error that prevents a listener from starting.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct BindError {
    message: String,
    #[source]
    source: Option<io::Error>,
}

impl BindError {
    pub(crate) fn new(message: String, source: Option<io::Error>) -> Self {
        Self { message, source }
    }
}

impl From<UnknownAccount> for BindError {
    fn from(unknown: UnknownAccount) -> Self {
        Self::new(unknown.to_string(), None)
    }
}
