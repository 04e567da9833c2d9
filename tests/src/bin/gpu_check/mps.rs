//! A private MPS control daemon for measurements without the supervisor.

use std::fs;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use tempfile::TempDir;
use tokio::io::AsyncWriteExt;
use tokio::process::{Child, Command};
use tokio::time::{Instant, interval, timeout};

use crate::error::StageError;
use crate::tools::{CheckSettings, ProcessFamily};

/// The program that is both the daemon and the client that sends commands to the daemon.
const CONTROL: &str = "nvidia-cuda-mps-control";

/// The time limit for one command to the daemon.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(10);

/// The time limit for the start of the daemon and its server.
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// A daemon with a server for one GPU. Dropping this value kills both.
#[derive(Debug)]
pub(crate) struct PrivateMpsDaemon {
    /// The pipe directory. It is in /tmp because the path of a Unix socket must be short.
    folder: TempDir,
    logs: PathBuf,
    child: Child,
    /// The daemon and its server. Dropping this value kills them.
    _family: ProcessFamily,
    uuid: String,
}

impl PrivateMpsDaemon {
    /// Starts the daemon and its server.
    pub(crate) async fn start(settings: &CheckSettings, uuid: &str) -> Result<Self, StageError> {
        let folder = tempfile::Builder::new().prefix("ss-mps-").tempdir_in("/tmp");
        let folder =
            folder.map_err(|source| StageError::Io { what: "create a folder in /tmp".into(), source })?;
        let logs = settings.out.join("logs").join("mps");
        fs::create_dir_all(&logs).map_err(StageError::io("create", &logs))?;
        let log = settings.log("mps-control");
        let printed = fs::File::create(&log).map_err(StageError::io("write", &log))?;
        let errors = printed.try_clone().map_err(StageError::io("write", &log))?;
        let mut command = Command::new(CONTROL);
        // The standard input stays open, because the daemon could interpret its end as a command.
        command.arg("-f").stdin(Stdio::piped()).stdout(printed).stderr(errors).process_group(0);
        environment(&mut command, &folder, &logs, uuid);
        let child =
            command.spawn().map_err(|source| StageError::Io { what: format!("start {CONTROL}"), source })?;
        let family = ProcessFamily::of(&child);
        let daemon = Self { folder, logs, child, _family: family, uuid: uuid.into() };
        daemon.wait_ready().await?;
        Ok(daemon)
    }

    /// Sets the environment variables that make a program a client of the daemon.
    pub(crate) fn configure_client(&self, command: &mut Command) {
        environment(command, &self.folder, &self.logs, &self.uuid);
    }

    /// Sends one command to the daemon, and returns the output.
    async fn ask(&self, shell_command: &str) -> Result<String, StageError> {
        let mut command = Command::new(CONTROL);
        self.configure_client(&mut command);
        let failed = |source| StageError::Io { what: format!("run {CONTROL} {shell_command}"), source };
        let exchange = async {
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).kill_on_drop(true);
            let mut shell = command.spawn()?;
            if let Some(mut stdin) = shell.stdin.take() {
                stdin.write_all(format!("{shell_command}\n").as_bytes()).await?;
            }
            shell.wait_with_output().await
        };
        let answered = timeout(COMMAND_TIMEOUT, exchange).await;
        let program = format!("{CONTROL} {shell_command}");
        let output = answered
            .map_err(|_| StageError::Timeout { program, within: COMMAND_TIMEOUT })?
            .map_err(failed)?;
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }

    async fn wait_ready(&self) -> Result<(), StageError> {
        let deadline = Instant::now() + START_TIMEOUT;
        let mut tick = interval(Duration::from_millis(100));
        let user = nix::unistd::getuid();
        loop {
            tick.tick().await;
            // The command fails until the daemon listens. It does nothing if a server already
            // exists. The error is therefore ignored.
            let _ = self.ask(&format!("start_server -uid {user}")).await;
            let servers = self.ask("get_server_list").await.unwrap_or_default();
            if let Some(server) = servers.split_ascii_whitespace().next()
                && server.parse::<u32>().is_ok()
                && self
                    .ask(&format!("get_server_status {server}"))
                    .await
                    .is_ok_and(|status| status.contains("ACTIVE"))
            {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(StageError::Timeout {
                    program: format!("the start of {CONTROL}"),
                    within: START_TIMEOUT,
                });
            }
        }
    }

    /// Stops the daemon with `quit`, which waits until the daemon has no clients.
    pub(crate) async fn stop(mut self) -> Result<(), StageError> {
        self.ask("quit").await?;
        let ended = timeout(COMMAND_TIMEOUT, self.child.wait()).await;
        let program = format!("{CONTROL} -f");
        let ended = ended.map_err(|_| StageError::Timeout { program, within: COMMAND_TIMEOUT })?;
        ended.map_err(|source| StageError::Io { what: format!("wait for {CONTROL}"), source })?;
        Ok(())
    }
}

fn environment(command: &mut Command, folder: &TempDir, logs: &std::path::Path, uuid: &str) {
    command
        .env("CUDA_MPS_PIPE_DIRECTORY", folder.path())
        .env("CUDA_MPS_LOG_DIRECTORY", logs)
        .env("CUDA_VISIBLE_DEVICES", uuid)
        .env_remove("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE");
}
