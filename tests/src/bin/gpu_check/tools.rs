//! The settings that all stages use, and functions that run programs with a time limit.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use nix::sys::signal::Signal;
use shadowslice_tests::process::{ProcessHandle, descendants};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use crate::Arguments;
use crate::error::StageError;
use crate::models::{self, MeasuredModel};

/// The device to measure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum CheckedDevice {
    /// A GPU, by its index.
    Gpu(String),
    /// An emulated GPU, for a rehearsal.
    Emulated,
}

/// The settings of all stages.
#[derive(Debug)]
pub(crate) struct CheckSettings {
    pub(crate) bin_dir: PathBuf,
    pub(crate) out: PathBuf,
    pub(crate) device: CheckedDevice,
    pub(crate) models: Vec<MeasuredModel>,
    /// The half-precision models, which cannot have a share by percentage.
    pub(crate) half_models: Vec<MeasuredModel>,
    /// The models that a quick run uses only for mixes from files.
    pub(crate) mix_only_models: Vec<MeasuredModel>,
    /// The files with mixes. If there are none, the mixes of the source tree are used.
    pub(crate) mixes: Vec<PathBuf>,
    /// The factor by which the rates of the mixes are multiplied.
    pub(crate) scale: f64,
    /// The names of the mixes to run. If the list is empty, all mixes run.
    pub(crate) scenarios: Vec<String>,
    /// The names of the policies to run. If the list is empty, the default policies run.
    pub(crate) policies: Vec<String>,
    /// The number of rounds in which each policy is measured.
    pub(crate) rounds: u32,
    pub(crate) quick: bool,
    pub(crate) again: bool,
}

impl CheckSettings {
    /// Derives the settings from the command-line arguments, and creates the folders.
    pub(crate) fn new(arguments: &Arguments) -> Result<Self, StageError> {
        let device = match arguments.device.as_str() {
            "emulated" => CheckedDevice::Emulated,
            index => CheckedDevice::Gpu(index.into()),
        };
        for folder in ["logs", "profiles"] {
            let folder = arguments.out.join(folder);
            fs::create_dir_all(&folder).map_err(StageError::io("create", &folder))?;
        }
        let absolute = |path: &Path| fs::canonicalize(path).map_err(StageError::io("find", path));
        let out = absolute(&arguments.out)?;
        if device == CheckedDevice::Emulated && out.ends_with("target/measurements") {
            let why = "a rehearsal on the emulated device measures nothing; use another folder than target/measurements";
            return Err(StageError::Unusable(why.into()));
        }
        let found = models::find(&absolute(&arguments.models)?, &arguments.only)?;
        let (mut half_models, mut models): (Vec<_>, Vec<_>) =
            found.into_iter().partition(MeasuredModel::is_half);
        let mut mix_only_models = Vec::new();
        if arguments.quick {
            mix_only_models.extend(models.split_off(models.len().min(2)));
            mix_only_models.extend(half_models.split_off(half_models.len().min(1)));
        }
        let bin_dir = absolute(&arguments.bin_dir)?;
        let Arguments { scale, rounds, quick, again, .. } = *arguments;
        Ok(Self {
            bin_dir,
            out,
            device,
            models,
            half_models,
            mix_only_models,
            mixes: arguments.mixes.clone(),
            scale,
            scenarios: arguments.scenarios.clone(),
            policies: arguments.policies.clone(),
            rounds,
            quick,
            again,
        })
    }

    /// Returns the path of the supervisor's binary.
    pub(crate) fn supervisor(&self) -> PathBuf {
        self.bin_dir.join("shadowslice")
    }

    /// Returns the path of the worker's binary.
    pub(crate) fn worker(&self) -> PathBuf {
        self.bin_dir.join("shadowslice-worker")
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.models.iter().map(|model| model.name.clone()).collect()
    }

    pub(crate) fn log(&self, name: &str) -> PathBuf {
        self.out.join("logs").join(format!("{name}.log"))
    }

    /// Writes a file next to the logs.
    pub(crate) fn write_beside_logs(&self, name: &str, text: &str) -> Result<(), StageError> {
        let path = self.out.join("logs").join(name);
        fs::write(&path, text).map_err(StageError::io("write", &path))
    }

    /// Returns `quick` in a quick run, and otherwise `full`.
    pub(crate) fn count(&self, full: usize, quick: usize) -> usize {
        if self.quick { quick } else { full }
    }
}

/// Runs a program until it exits, appends its stderr to a log, and returns its stdout.
pub(crate) async fn output(mut command: Command, within: Duration, log: &Path) -> Result<String, StageError> {
    let program = {
        let command = command.as_std();
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
    };
    let stderr =
        fs::File::options().create(true).append(true).open(log).map_err(StageError::io("write", log))?;
    let failed = |source| StageError::Io { what: format!("run `{program}`"), source };
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(stderr).spawn().map_err(failed)?;
    let _family = ProcessFamily::of(&child);
    let Ok(result) = timeout(within, child.wait_with_output()).await else {
        return Err(StageError::Timeout { program, within });
    };
    let output = result.map_err(failed)?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        let output_end =
            format!("{}; {}", last_line(&output.stdout), last_line(&fs::read(log).unwrap_or_default()));
        Err(StageError::Program { program, status: output.status, output: output_end })
    }
}

/// The time limit of `nvidia-smi`.
const SMI_TIMEOUT: Duration = Duration::from_secs(10);

/// Queries one property of a GPU with `nvidia-smi`, and returns the value without its unit.
pub(crate) async fn query_gpu(
    settings: &CheckSettings,
    index: &str,
    field: &str,
) -> Result<String, StageError> {
    let mut command = Command::new("nvidia-smi");
    command.args(["-i", index, &format!("--query-gpu={field}"), "--format=csv,noheader,nounits"]);
    Ok(output(command, SMI_TIMEOUT, &settings.log("nvidia-smi")).await?.trim().to_owned())
}

/// A program and all processes that it started. Dropping this value kills all of them if the
/// program is still running.
#[derive(Debug)]
pub(crate) struct ProcessFamily(Option<ProcessHandle>);

impl ProcessFamily {
    /// Makes the family of a running child process.
    pub(crate) fn of(child: &Child) -> Self {
        Self(child.id().and_then(|pid| i32::try_from(pid).ok()).and_then(ProcessHandle::of))
    }
}

impl Drop for ProcessFamily {
    fn drop(&mut self) {
        let Some(own) = self.0.filter(|own| own.is_alive()) else { return };
        let others = descendants(own.pid);
        // A signal fails only if the process has exited, so the error is ignored.
        let _ = own.signal(Signal::SIGKILL);
        for other in others {
            let _ = other.signal(Signal::SIGKILL);
        }
    }
}

/// Returns the last line of an output that starts with `error:`. Without such a line, returns the
/// last line of the output.
fn last_line(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    let error = text.lines().rfind(|line| line.starts_with("error:"));
    error.or(text.lines().rfind(|line| !line.trim().is_empty())).unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_program_that_times_out_is_killed_with_its_children() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 60 & echo $! > child; wait"]).current_dir(folder.path());
        let ended = output(command, Duration::from_secs(2), &log).await;
        assert!(matches!(ended, Err(StageError::Timeout { .. })), "{ended:?}");
        let child = fs::read_to_string(folder.path().join("child")).unwrap().trim().parse().unwrap();
        let gone = async {
            let mut tick = tokio::time::interval(Duration::from_millis(10));
            while ProcessHandle::of(child).is_some() {
                tick.tick().await;
            }
        };
        timeout(Duration::from_secs(10), gone).await.expect("the child was killed");
    }

    #[tokio::test]
    async fn the_error_contains_the_last_line_of_the_program() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let mut command = Command::new("sh");
        command.args(["-c", "echo first >&2; echo second >&2; exit 3"]);
        let error = output(command, Duration::from_secs(10), &log).await.unwrap_err().to_string();
        assert!(error.contains("second") && error.contains("exit status: 3"), "{error}");
        let mut command = Command::new("sh");
        command.args(["-c", "echo fine"]);
        assert_eq!(output(command, Duration::from_secs(10), &log).await.unwrap(), "fine\n");
    }
}
