//! The folder of one supervisor under test, and the `shadowslice` commands that run in it.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Output, Stdio};
use std::time::Duration;

use tempfile::TempDir;
use tokio::process::Command;
use tokio::time::timeout;

use crate::process::ProcessHandle;

/// The default time limit for each action of a supervisor under test.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);

/// The number of lines from the end of the supervisor's log that an error shows.
const LOG_LINES: usize = 30;

/// The reasons why the test harness cannot start, control or stop a supervisor.
#[derive(Debug, thiserror::Error)]
pub enum HarnessError {
    /// A failed operation on a file or process of the harness itself.
    #[error("cannot {what}")]
    Io {
        /// The operation, as an infinitive.
        what: String,
        source: io::Error,
    },
    #[error("{} not found; run `cargo build --workspace`, or set SHADOWSLICE_BIN", .0.display())]
    NoBinary(PathBuf),
    #[error("timed out after {within:?} waiting for {what}; the supervisor's log:\n{log}")]
    Timeout {
        within: Duration,
        /// The condition.
        what: String,
        /// The end of the supervisor's log.
        log: String,
    },
    #[error("the supervisor exited with {status}; its log:\n{log}")]
    Exited {
        status: ExitStatus,
        /// The end of the supervisor's log.
        log: String,
    },
    #[error("`shadowslice {command}` exited with {status}: {stderr}")]
    Command {
        /// The arguments of the command.
        command: String,
        status: ExitStatus,
        stderr: String,
    },
    #[error("unexpected output of `shadowslice {command}`: {printed}")]
    UnexpectedOutput {
        /// The arguments of the command.
        command: String,
        printed: String,
        source: serde_json::Error,
    },
    #[error("`shadowslice status` has no model {0}")]
    UnknownModel(String),
    /// Processes and files that the supervisor left behind.
    #[error("the supervisor left behind: {}", .0.join(", "))]
    LeftBehind(Vec<String>),
}

/// A folder for one supervisor, with its configuration, run directory and temporary files. The
/// folder is in /tmp because the path of a Unix socket must be short.
#[derive(Debug)]
pub struct Home {
    folder: TempDir,
    environment: Vec<(OsString, OsString)>,
    binary: Option<PathBuf>,
    log: PathBuf,
    timeout: Duration,
}

impl Home {
    /// Creates an empty folder.
    pub fn new() -> Result<Self, HarnessError> {
        let folder = tempfile::Builder::new()
            .prefix("ss-")
            .tempdir_in("/tmp")
            .map_err(|source| HarnessError::Io { what: "create a folder in /tmp".into(), source })?;
        let log = folder.path().join("log");
        let home = Self { folder, environment: Vec::new(), binary: None, log, timeout: DEFAULT_TIMEOUT };
        let temporary = home.path().join("tmp");
        fs::create_dir(&temporary)
            .map_err(|source| HarnessError::Io { what: format!("create {}", temporary.display()), source })?;
        Ok(home)
    }

    /// Creates a folder that contains this configuration as `config.yaml`.
    pub fn with_config(yaml: &str) -> Result<Self, HarnessError> {
        let home = Self::new()?;
        home.write("config.yaml", yaml)?;
        Ok(home)
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Returns the default run directory of the supervisor. A configuration can set another
    /// directory.
    pub fn run_dir(&self) -> PathBuf {
        self.path().join("run")
    }

    /// Writes a file into the folder, and returns its path.
    pub fn write(&self, name: &str, contents: impl AsRef<[u8]>) -> Result<PathBuf, HarnessError> {
        let path = self.path().join(name);
        fs::write(&path, contents)
            .map_err(|source| HarnessError::Io { what: format!("write {}", path.display()), source })?;
        Ok(path)
    }

    /// Returns the end of the supervisor's log.
    pub fn log(&self) -> String {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(LOG_LINES)..].join("\n")
    }

    /// Sets a variable in the supervisor's environment.
    pub fn set_env(&mut self, name: &str, value: impl Into<OsString>) {
        self.environment.push((name.into(), value.into()));
    }

    /// Sets the `shadowslice` binary that is run instead of the default binary.
    pub fn set_binary(&mut self, path: PathBuf) {
        self.binary = Some(path);
    }

    /// Replaces the worker with a shell script. Copies `shadowslice` to a folder `bin` next to the
    /// script.
    pub fn set_worker(&mut self, script: &str) -> Result<(), HarnessError> {
        let failed = |source| HarnessError::Io { what: "replace the supervisor's worker".into(), source };
        let folder = self.path().join("bin");
        fs::create_dir_all(&folder).map_err(failed)?;
        let program = folder.join("shadowslice");
        fs::copy(binary()?, &program).map_err(failed)?;
        let worker = self.write("bin/shadowslice-worker", format!("#!/bin/sh\n{script}\n"))?;
        fs::set_permissions(worker, fs::Permissions::from_mode(0o755)).map_err(failed)?;
        self.set_binary(program);
        Ok(())
    }

    /// Sets the path of the supervisor's log.
    pub fn set_log(&mut self, path: PathBuf) {
        self.log = path;
    }

    /// Returns the path of the supervisor's log.
    pub fn log_path(&self) -> &Path {
        &self.log
    }

    /// Makes the supervisor keep optimised models in this folder, which remains after the
    /// supervisor has exited.
    pub fn keep_optimised_in(&mut self, folder: &Path) {
        self.set_env("CACHE_DIRECTORY", folder);
    }

    /// Sets the time limit for each action of the supervisor.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Returns the time limit for each action of the supervisor.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Makes a `shadowslice` command with this folder's environment. TMPDIR and HOME point into the
    /// folder, so [`left_behind`] finds the files that the command leaves there.
    /// ORT_DISABLE_TELEMETRY is unset, because the supervisor itself must disable the telemetry of
    /// ONNX Runtime.
    pub fn command(&self, arguments: &[&str]) -> Result<Command, HarnessError> {
        let mut command = Command::new(self.binary.clone().map_or_else(binary, Ok)?);
        command
            .args(arguments)
            .current_dir(self.path())
            .env("RUNTIME_DIRECTORY", self.run_dir())
            .env("SHADOWSLICE_RUN_DIR", self.run_dir())
            .env("TMPDIR", self.path().join("tmp"))
            .env("HOME", self.path().join("tmp"))
            .env("CACHE_DIRECTORY", self.path().join("cache"))
            .env_remove("ORT_DISABLE_TELEMETRY")
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .kill_on_drop(true);
        Ok(command)
    }

    /// Runs a `shadowslice` command until it exits.
    pub async fn run(&self, arguments: &[&str]) -> Result<Output, HarnessError> {
        let what = format!("`shadowslice {}`", arguments.join(" "));
        let within = self.timeout;
        let output = timeout(within, self.command(arguments)?.output()).await;
        let output =
            output.map_err(|_| HarnessError::Timeout { within, what: what.clone(), log: String::new() })?;
        output.map_err(|source| HarnessError::Io { what: format!("run {what}"), source })
    }
}

/// Returns the `shadowslice` binary. This is SHADOWSLICE_BIN, or the binary that was built next to
/// the running program.
fn binary() -> Result<PathBuf, HarnessError> {
    match std::env::var_os("SHADOWSLICE_BIN") {
        Some(path) => Ok(path.into()),
        None => sibling_binary("shadowslice"),
    }
}

/// Returns the path of a binary of this workspace, which was built next to the running program.
pub fn sibling_binary(name: &str) -> Result<PathBuf, HarnessError> {
    let own = std::env::current_exe()
        .map_err(|source| HarnessError::Io { what: "find the running program".into(), source })?;
    // Cargo puts test binaries into the folder `deps`, one level below the other binaries.
    let folder = own.parent().filter(|folder| !folder.ends_with("deps")).or(own.ancestors().nth(2));
    let path = folder.unwrap_or(Path::new(".")).join(name);
    if path.is_file() { Ok(path) } else { Err(HarnessError::NoBinary(path)) }
}

/// Lists the processes, sockets and temporary files that a supervisor left behind after its exit.
pub fn left_behind(home: &Home, children: &[ProcessHandle]) -> Vec<String> {
    let processes = children.iter().filter(|child| child.is_alive());
    let mut left: Vec<String> = processes.map(|child| format!("process {}", child.pid)).collect();
    let mut folders = vec![home.run_dir(), home.path().join("tmp")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => folders.push(entry.path()),
                Ok(kind) if kind.is_socket() || entry.path().starts_with(home.path().join("tmp")) => {
                    left.push(entry.path().display().to_string());
                }
                _ => {}
            }
        }
    }
    left
}
