//! Runs short-lived programs with an input, a limit on their output and a timeout.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, Command};

use super::{Variables, inherited_settings};
use crate::process::{close_on_exec, own};

/// The maximum number of bytes that are read from each output stream of a program.
const MAX_OUTPUT_BYTES: u64 = 64 * 1024;

#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    #[error("cannot start {program}")]
    Start {
        program: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot communicate with {program}")]
    Talk {
        program: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{program} timed out after {limit:?} and was killed")]
    TooLate { program: PathBuf, limit: Duration },
}

/// The output of a program that has exited.
#[derive(Debug)]
pub(super) struct CommandOutput {
    pub(super) status: ExitStatus,
    pub(super) out: String,
    pub(super) err: String,
}

/// Returns a command without the supervisor's MPS variables and descriptors. It has its own process
/// group, so Ctrl-C in a terminal does not reach it. Start it immediately. Like the start of a
/// worker, its start needs no `fork`, because `PATH` is unchanged and no `pre_exec` is set.
pub(super) fn command(program: &Path, environment: &Variables) -> io::Result<Command> {
    close_on_exec()?;
    let mut command = std::process::Command::new(program);
    for name in inherited_settings() {
        command.env_remove(name);
    }
    command.envs(environment.iter().map(|(name, value)| (name, value)));
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let mut command = Command::from(command);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    Ok(command)
}

/// Starts a command from [`command`].
pub(super) fn spawn(command: &mut Command) -> io::Result<Child> {
    own(|| command.spawn(), |child| child.id().and_then(|pid| i32::try_from(pid).ok()))
}

/// Runs a program with this input until it exits. Kills the program after `limit`.
pub(super) async fn run(
    program: &Path,
    arguments: &[&str],
    environment: &Variables,
    input: &str,
    limit: Duration,
) -> Result<CommandOutput, CommandError> {
    let named = || program.to_owned();
    let child = command(program, environment).and_then(|mut command| spawn(command.args(arguments)));
    let mut child = child.map_err(|source| CommandError::Start { program: named(), source })?;
    match tokio::time::timeout(limit, converse(&mut child, input)).await {
        Ok(said) => said.map_err(|source| CommandError::Talk { program: named(), source }),
        Err(_) => {
            // An error means that the program has exited in the meantime.
            child.kill().await.ok();
            Err(CommandError::TooLate { program: named(), limit })
        }
    }
}

async fn converse(child: &mut Child, input: &str) -> io::Result<CommandOutput> {
    if let Some(mut stdin) = child.stdin.take() {
        match stdin.write_all(input.as_bytes()).await {
            // A broken pipe means that the program does not read its input.
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => return Err(error),
            _ => {}
        }
    }
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    tokio::try_join!(read(stdout, &mut out), read(stderr, &mut err))?;
    let status = child.wait().await?;
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    Ok(CommandOutput { status, out: text(out), err: text(err) })
}

async fn read(from: Option<impl tokio::io::AsyncRead + Unpin>, to: &mut Vec<u8>) -> io::Result<()> {
    if let Some(from) = from {
        from.take(MAX_OUTPUT_BYTES).read_to_end(to).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::forks;

    #[tokio::test]
    async fn a_program_is_heard_and_started_without_a_fork() {
        let before = forks::seen();
        let environment = vec![("A", "b".to_owned())];
        let limit = Duration::from_secs(10);
        let said = run(Path::new("sh"), &["-c", "cat; echo $A"], &environment, "in ", limit).await.unwrap();
        assert_eq!((said.out.as_str(), said.status.success()), ("in b\n", true));
        assert_eq!(forks::seen(), before);
    }
}
