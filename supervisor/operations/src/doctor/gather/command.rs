//! Asking other programs, for no longer than a moment.

use std::io;
use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;

const PATIENCE: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
pub(super) enum Silent {
    #[error("it cannot be run")]
    Run(#[source] io::Error),
    #[error("it did not end within {PATIENCE:?}")]
    TooLate,
}

/// A program's output, on stdout and then on stderr, until it ends.
pub(super) fn output(program: impl AsRef<std::ffi::OsStr>, arguments: &[&str]) -> Result<String, Silent> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Silent::Run)?;
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).kill_on_drop(true);
    runtime.block_on(async {
        let output = tokio::time::timeout(PATIENCE, command.output()).await.map_err(|_| Silent::TooLate)?;
        let output = output.map_err(Silent::Run)?;
        let said = [output.stdout, output.stderr].concat();
        Ok(String::from_utf8_lossy(&said).into_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hears_both_streams_and_says_what_cannot_be_run() {
        assert_eq!(output("sh", &["-c", "echo out; echo err >&2"]).unwrap(), "out\nerr\n");
        assert!(matches!(output("/nowhere/program", &[]), Err(Silent::Run(_))));
    }
}
