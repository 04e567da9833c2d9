//! The failures of a stage.

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;

use shadowslice_tests::home;

/// Why a stage has no figures, or only some.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StageError {
    /// The supervisor under test, or the harness around it.
    #[error("the server")]
    Server(#[from] home::HarnessError),
    /// A file or process.
    #[error("cannot {what}")]
    Io { what: String, source: io::Error },
    /// A text that is no JSON.
    #[error("{what} is no JSON")]
    Json { what: String, source: serde_json::Error },
    /// A program that failed.
    #[error("`{program}` ended with {status}: {said}")]
    Program { program: String, status: ExitStatus, said: String },
    /// A program that did not end.
    #[error("`{program}` did not end within {within:?}")]
    Endless { program: String, within: Duration },
    /// A request that was not answered.
    #[error("{model} did not answer: {why}")]
    Request { model: String, why: String },
    /// Any other condition that makes a measurement impossible.
    #[error("{0}")]
    Unusable(String),
}

impl StageError {
    /// Makes the error of an operation on a file.
    pub(crate) fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path: PathBuf = path.into();
        move |source| Self::Io { what: format!("{what} {}", path.display()), source }
    }
}

/// An error with its causes, in one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |&cause| cause.source());
    causes.fold(error.to_string(), |said, cause| format!("{said}: {cause}"))
}
