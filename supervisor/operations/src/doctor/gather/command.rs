//! Runs other programs with a time limit.

use std::ffi::OsStr;
use std::io;
use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;

/// The time within which a program must exit.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Runs a program and returns its stdout, followed by its stderr, or the reason why it failed.
pub(super) fn output(program: impl AsRef<OsStr>, arguments: &[&str]) -> Result<String, String> {
    let failed = |error: io::Error| format!("cannot run the program: {error}");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null()).kill_on_drop(true);
    let output = runtime.block_on(async { tokio::time::timeout(TIMEOUT, command.output()).await });
    let output =
        output.map_err(|_| format!("the program did not exit within {TIMEOUT:?}"))?.map_err(failed)?;
    let text = [output.stdout, output.stderr].concat();
    Ok(String::from_utf8_lossy(&text).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_has_both_streams_or_the_reason_why_there_is_none() {
        assert_eq!(output("sh", &["-c", "echo out; echo err >&2"]).unwrap(), "out\nerr\n");
        assert!(output("/nowhere/program", &[]).unwrap_err().starts_with("cannot run the program: "));
    }
}
