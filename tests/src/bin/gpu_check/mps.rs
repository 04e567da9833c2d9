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

/// The daemon's program, and the shell that talks to it.
const CONTROL: &str = "nvidia-cuda-mps-control";

/// How long one command of the shell may take.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// How long the daemon and its server may take to come up.
const READY_WITHIN: Duration = Duration::from_secs(20);

/// A daemon with a server, for one GPU. Dropping it kills both.
#[derive(Debug)]
pub(crate) struct PrivateMpsDaemon {
    /// Short, since a Unix socket's path may not be long.
    folder: TempDir,
    logs: PathBuf,
    child: Child,
    /// The daemon and its server.
    _family: ProcessFamily,
    uuid: String,
}

impl PrivateMpsDaemon {
    /// Starts it, and its server.
    pub(crate) async fn start(setting: &CheckSettings, uuid: &str) -> Result<Self, StageError> {
        let made = tempfile::Builder::new().prefix("ss-mps-").tempdir_in("/tmp");
        let folder =
            made.map_err(|source| StageError::Io { what: "make a folder in /tmp".into(), source })?;
        let logs = setting.out.join("logs").join("mps");
        fs::create_dir_all(&logs).map_err(StageError::io("make", &logs))?;
        let log = setting.log("mps-control");
        let printed = fs::File::create(&log).map_err(StageError::io("write", &log))?;
        let errors = printed.try_clone().map_err(StageError::io("write", &log))?;
        let mut command = Command::new(CONTROL);
        // Its standard input stays open: it might take an end for an order.
        command.arg("-f").stdin(Stdio::piped()).stdout(printed).stderr(errors).process_group(0);
        environment(&mut command, &folder, &logs, uuid);
        let child =
            command.spawn().map_err(|source| StageError::Io { what: format!("start {CONTROL}"), source })?;
        let family = ProcessFamily::of(&child);
        let daemon = Self { folder, logs, child, _family: family, uuid: uuid.into() };
        daemon.wait_ready().await?;
        Ok(daemon)
    }

    /// Makes a program a client of it.
    pub(crate) fn serve(&self, command: &mut Command) {
        environment(command, &self.folder, &self.logs, &self.uuid);
    }

    /// The answer to one command of the shell.
    async fn ask(&self, order: &str) -> Result<String, StageError> {
        let mut command = Command::new(CONTROL);
        self.serve(&mut command);
        let failed = |source| StageError::Io { what: format!("ask {CONTROL} for {order}"), source };
        let asking = async {
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).kill_on_drop(true);
            let mut shell = command.spawn()?;
            if let Some(mut stdin) = shell.stdin.take() {
                stdin.write_all(format!("{order}\n").as_bytes()).await?;
            }
            shell.wait_with_output().await
        };
        let answered = timeout(ANSWER_WITHIN, asking).await;
        let program = format!("{CONTROL} {order}");
        let output =
            answered.map_err(|_| StageError::Endless { program, within: ANSWER_WITHIN })?.map_err(failed)?;
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }

    async fn wait_ready(&self) -> Result<(), StageError> {
        let deadline = Instant::now() + READY_WITHIN;
        let mut look = interval(Duration::from_millis(100));
        let user = nix::unistd::getuid();
        loop {
            look.tick().await;
            // Refused until the daemon listens, and harmless once there is a server.
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
                return Err(StageError::Endless {
                    program: format!("the start of {CONTROL}"),
                    within: READY_WITHIN,
                });
            }
        }
    }

    /// Ends it in peace, which takes that its clients are gone.
    pub(crate) async fn stop(mut self) -> Result<(), StageError> {
        self.ask("quit").await?;
        let ended = timeout(ANSWER_WITHIN, self.child.wait()).await;
        let program = format!("{CONTROL} -f");
        let ended = ended.map_err(|_| StageError::Endless { program, within: ANSWER_WITHIN })?;
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
