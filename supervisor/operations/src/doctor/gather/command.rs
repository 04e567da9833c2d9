//! Asking other programs, for no longer than a moment.

use std::ffi::OsStr;
use std::io;
use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;

const PATIENCE: Duration = Duration::from_secs(5);

/// A program's output, on stdout and then on stderr, until it ends; or why there is none.
pub(super) fn output(program: impl AsRef<OsStr>, arguments: &[&str]) -> Result<String, String> {
    let failed = |error: io::Error| format!("it cannot be run: {error}");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).kill_on_drop(true);
    let output = runtime.block_on(async { tokio::time::timeout(PATIENCE, command.output()).await });
    let output = output.map_err(|_| format!("it did not end within {PATIENCE:?}"))?.map_err(failed)?;
    let said = [output.stdout, output.stderr].concat();
    Ok(String::from_utf8_lossy(&said).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hears_both_streams_and_says_what_cannot_be_run() {
        assert_eq!(output("sh", &["-c", "echo out; echo err >&2"]).unwrap(), "out\nerr\n");
        assert!(output("/nowhere/program", &[]).unwrap_err().starts_with("it cannot be run: "));
    }
}
