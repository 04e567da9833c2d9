//! Short-lived programs: fed, read and bounded.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, Command};

use super::{Environment, inherited_settings};
use crate::process::{close_on_exec, own};

/// The most bytes of a program's output that are read, on each stream.
const MAX_OUTPUT: u64 = 64 * 1024;

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

#[derive(Debug)]
pub(super) struct Said {
    pub(super) status: ExitStatus,
    pub(super) out: String,
    pub(super) err: String,
}

/// Without the supervisor's MPS variables and descriptors, in a process group of its own, so that a
/// terminal's Ctrl-C does not reach it. To be started at once, and without a `fork`, as workers
/// are: `PATH` is unchanged, and there is no `pre_exec`.
pub(super) fn command(program: &Path, environment: &Environment) -> io::Result<Command> {
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

/// Starts what [`command`] has made.
pub(super) fn spawn(command: &mut Command) -> io::Result<Child> {
    own(|| command.spawn(), |child| child.id().and_then(|pid| i32::try_from(pid).ok()))
}

/// Runs a program to its end, with this input; kills it after `limit`.
pub(super) async fn run(
    program: &Path,
    arguments: &[&str],
    environment: &Environment,
    input: &str,
    limit: Duration,
) -> Result<Said, CommandError> {
    let named = || program.to_owned();
    let child = command(program, environment).and_then(|mut command| spawn(command.args(arguments)));
    let mut child = child.map_err(|source| CommandError::Start { program: named(), source })?;
    match tokio::time::timeout(limit, converse(&mut child, input)).await {
        Ok(said) => said.map_err(|source| CommandError::Talk { program: named(), source }),
        Err(_) => {
            // An error means that it has ended meanwhile.
            child.kill().await.ok();
            Err(CommandError::TooLate { program: named(), limit })
        }
    }
}

async fn converse(child: &mut Child, input: &str) -> io::Result<Said> {
    if let Some(mut stdin) = child.stdin.take() {
        match stdin.write_all(input.as_bytes()).await {
            // A broken pipe means that the program reads no input.
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => return Err(error),
            _ => {}
        }
    }
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    tokio::try_join!(read(stdout, &mut out), read(stderr, &mut err))?;
    let status = child.wait().await?;
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    Ok(Said { status, out: text(out), err: text(err) })
}

async fn read(from: Option<impl tokio::io::AsyncRead + Unpin>, to: &mut Vec<u8>) -> io::Result<()> {
    if let Some(from) = from {
        from.take(MAX_OUTPUT).read_to_end(to).await?;
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
