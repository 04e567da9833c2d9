//! A folder for one supervisor under test, and the `shadowslice` commands run in it.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Output, Stdio};
use std::time::Duration;

use tempfile::TempDir;
use tokio::process::Command;
use tokio::time::timeout;

use crate::process::ProcessHandle;

/// How long anything that the supervisor does by itself may take here, unless a folder says otherwise.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);

/// How much of the supervisor's log an error shows, in lines.
const LOG_LINES: usize = 30;

/// The failure of a supervisor under test.
#[derive(Debug, thiserror::Error)]
pub enum HarnessError {
    /// A file or process of the harness itself.
    #[error("cannot {what}")]
    Io {
        /// The action that failed.
        what: String,
        /// The cause.
        source: io::Error,
    },
    /// The binary is not there.
    #[error("there is no {}; build it first (`cargo build --workspace`), or set SHADOWSLICE_BIN", .0.display())]
    NoBinary(PathBuf),
    /// Something did not happen in time.
    #[error("not within {within:?}: {what}; its log:\n{log}")]
    TooLate {
        /// How long it was waited for.
        within: Duration,
        /// The condition that was waited for.
        what: String,
        /// The end of the supervisor's log.
        log: String,
    },
    /// The supervisor ended by itself or not as it should.
    #[error("the supervisor ended with {status}; its log:\n{log}")]
    Ended {
        /// Its exit status.
        status: ExitStatus,
        /// The end of its log.
        log: String,
    },
    /// A command of the `shadowslice` binary failed.
    #[error("`shadowslice {command}` ended with {status}: {stderr}")]
    Command {
        /// Its arguments.
        command: String,
        /// Its exit status.
        status: ExitStatus,
        /// The command's stderr.
        stderr: String,
    },
    /// A command printed a text that is not as agreed.
    #[error("`shadowslice {command}` printed {printed}")]
    Printed {
        /// Its arguments.
        command: String,
        /// The printed text.
        printed: String,
        /// The fault of the text.
        source: serde_json::Error,
    },
    /// The model is not known to the supervisor.
    #[error("`shadowslice status` names no model {0}")]
    NoModel(String),
    /// The supervisor left something behind.
    #[error("left behind: {}", .0.join(", "))]
    Left(Vec<String>),
}

/// A folder for one supervisor: its configuration, run directory and temporary files. Its path is
/// short, since a Unix socket's path may not be long.
#[derive(Debug)]
pub struct Home {
    folder: TempDir,
    environment: Vec<(OsString, OsString)>,
    binary: Option<PathBuf>,
    log: PathBuf,
    patience: Duration,
}

impl Home {
    /// An empty folder.
    pub fn new() -> Result<Self, HarnessError> {
        let folder = tempfile::Builder::new()
            .prefix("ss-")
            .tempdir_in("/tmp")
            .map_err(|source| HarnessError::Io { what: "make a folder in /tmp".into(), source })?;
        let log = folder.path().join("log");
        let home = Self { folder, environment: Vec::new(), binary: None, log, patience: DEFAULT_TIMEOUT };
        let temporary = home.path().join("tmp");
        fs::create_dir(&temporary)
            .map_err(|source| HarnessError::Io { what: format!("make {}", temporary.display()), source })?;
        Ok(home)
    }

    /// A folder that holds this configuration as `config.yaml`.
    pub fn with_config(yaml: &str) -> Result<Self, HarnessError> {
        let home = Self::new()?;
        home.write("config.yaml", yaml)?;
        Ok(home)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// The supervisor's run directory, unless the configuration names another.
    pub fn run_dir(&self) -> PathBuf {
        self.path().join("run")
    }

    /// Writes a file into it.
    pub fn write(&self, name: &str, contents: impl AsRef<[u8]>) -> Result<PathBuf, HarnessError> {
        let path = self.path().join(name);
        fs::write(&path, contents)
            .map_err(|source| HarnessError::Io { what: format!("write {}", path.display()), source })?;
        Ok(path)
    }

    /// The end of the supervisor's log.
    pub fn log(&self) -> String {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(LOG_LINES)..].join("\n")
    }

    /// Sets a variable in the supervisor's environment.
    pub fn set_env(&mut self, name: &str, value: impl Into<OsString>) {
        self.environment.push((name.into(), value.into()));
    }

    /// Runs this `shadowslice` instead of the binary that is found.
    pub fn set_binary(&mut self, path: PathBuf) {
        self.binary = Some(path);
    }

    /// Runs the binary from a folder `bin` of its own, where this script is the worker's.
    pub fn set_worker(&mut self, script: &str) -> Result<(), HarnessError> {
        let failed = |source| HarnessError::Io { what: "give the supervisor another worker".into(), source };
        let folder = self.path().join("bin");
        fs::create_dir_all(&folder).map_err(failed)?;
        let program = folder.join("shadowslice");
        fs::copy(binary()?, &program).map_err(failed)?;
        let worker = self.write("bin/shadowslice-worker", format!("#!/bin/sh\n{script}\n"))?;
        fs::set_permissions(worker, fs::Permissions::from_mode(0o755)).map_err(failed)?;
        self.set_binary(program);
        Ok(())
    }

    /// Writes the supervisor's log there instead of into this folder.
    pub fn set_log(&mut self, path: PathBuf) {
        self.log = path;
    }

    /// Where the supervisor's log goes.
    pub fn log_path(&self) -> &Path {
        &self.log
    }

    /// Lets the supervisor keep optimised models in this folder, which outlives it.
    pub fn keep_optimised_in(&self, folder: &Path) -> Result<(), HarnessError> {
        let failed =
            |source| HarnessError::Io { what: format!("keep models in {}", folder.display()), source };
        let private = self.run_dir().join("private");
        // The supervisor takes no folder that others may write to.
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&private).map_err(failed)?;
        symlink(folder, private.join("tensorrt")).map_err(failed)
    }

    /// Sets how long to wait for actions that the supervisor takes by itself.
    pub fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// How long anything that the supervisor does by itself may take.
    pub fn patience(&self) -> Duration {
        self.patience
    }

    /// The `shadowslice` command in this folder's environment. [`left_behind`] finds all files that
    /// it writes to the temporary or the home directory. ONNX Runtime's library writes its
    /// telemetry there unless the supervisor prevents it, and this environment does nothing to
    /// prevent it.
    pub fn command(&self, arguments: &[&str]) -> Result<Command, HarnessError> {
        let mut command = Command::new(self.binary.clone().map_or_else(binary, Ok)?);
        command
            .args(arguments)
            .current_dir(self.path())
            .env("RUNTIME_DIRECTORY", self.run_dir())
            .env("SHADOWSLICE_RUN_DIR", self.run_dir())
            .env("TMPDIR", self.path().join("tmp"))
            .env("HOME", self.path().join("tmp"))
            .env_remove("ORT_DISABLE_TELEMETRY")
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .kill_on_drop(true);
        Ok(command)
    }

    /// Runs a command of `shadowslice` to its end.
    pub async fn run(&self, arguments: &[&str]) -> Result<Output, HarnessError> {
        let what = format!("`shadowslice {}`", arguments.join(" "));
        let within = self.patience;
        let output = timeout(within, self.command(arguments)?.output()).await;
        let output =
            output.map_err(|_| HarnessError::TooLate { within, what: what.clone(), log: String::new() })?;
        output.map_err(|source| HarnessError::Io { what: format!("run {what}"), source })
    }
}

/// The `shadowslice` binary: named by SHADOWSLICE_BIN, or built beside this one.
fn binary() -> Result<PathBuf, HarnessError> {
    match std::env::var_os("SHADOWSLICE_BIN") {
        Some(path) => Ok(path.into()),
        None => sibling_binary("shadowslice"),
    }
}

/// A binary of this workspace, built beside the running program.
pub fn sibling_binary(name: &str) -> Result<PathBuf, HarnessError> {
    let own = std::env::current_exe()
        .map_err(|source| HarnessError::Io { what: "find the running program".into(), source })?;
    // Cargo puts tests into `deps`, one folder below the binaries.
    let folder = own.parent().filter(|folder| !folder.ends_with("deps")).or(own.ancestors().nth(2));
    let path = folder.unwrap_or(Path::new(".")).join(name);
    if path.is_file() { Ok(path) } else { Err(HarnessError::NoBinary(path)) }
}

/// The remains of a supervisor that ended: processes, sockets, temporary and memory files.
pub fn left_behind(home: &Home, children: &[ProcessHandle]) -> Vec<String> {
    let processes = children.iter().filter(|child| child.alive());
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
