//! The errors of a stage.

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;

use shadowslice_tests::home;

/// An error that ends a stage.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StageError {
    /// A failure of the supervisor under test or of the test harness.
    #[error("the supervisor under test failed")]
    Server(#[from] home::HarnessError),
    /// A failed operation on a file or a process.
    #[error("cannot {what}")]
    Io { what: String, source: io::Error },
    #[error("{what} is not valid JSON")]
    Json { what: String, source: serde_json::Error },
    #[error("`{program}` exited with {status}: {output}")]
    Program { program: String, status: ExitStatus, output: String },
    #[error("`{program}` timed out after {within:?}")]
    Timeout { program: String, within: Duration },
    /// A request without a usable answer.
    #[error("a request to {model} failed: {why}")]
    Request { model: String, why: String },
    /// Any other condition that makes a measurement impossible.
    #[error("{0}")]
    Unusable(String),
}

impl StageError {
    /// Makes the error for an operation on a file.
    pub(crate) fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path: PathBuf = path.into();
        move |source| Self::Io { what: format!("{what} {}", path.display()), source }
    }
}

/// Formats an error and its causes in one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |&cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}
