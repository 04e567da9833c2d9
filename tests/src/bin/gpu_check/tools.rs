//! The settings of all stages, and programs that run to their end within a bound.

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
    /// A GPU by its index.
    Gpu(String),
    /// No GPU: a rehearsal.
    Emulated,
}

/// The settings of all stages.
#[derive(Debug)]
pub(crate) struct CheckSettings {
    pub(crate) bin_dir: PathBuf,
    pub(crate) out: PathBuf,
    pub(crate) device: CheckedDevice,
    pub(crate) models: Vec<MeasuredModel>,
    /// The models that compute in half precision, which have no share by percentage.
    pub(crate) halves: Vec<MeasuredModel>,
    /// The models that a quick run leaves to mixes from files.
    pub(crate) others: Vec<MeasuredModel>,
    /// The files with mixes; those in the tree if there is none.
    pub(crate) mixes: Vec<PathBuf>,
    /// The factor by which mixes' rates are multiplied.
    pub(crate) scale: f64,
    /// Only these scenarios, if any is named.
    pub(crate) scenarios: Vec<String>,
    /// Only these policies, if any is named,
    pub(crate) policies: Vec<String>,
    /// each so often.
    pub(crate) rounds: u32,
    pub(crate) quick: bool,
    pub(crate) again: bool,
}

impl CheckSettings {
    /// The settings that follow from the arguments; makes the folders.
    pub(crate) fn new(arguments: &Arguments) -> Result<Self, StageError> {
        let device = match arguments.device.as_str() {
            "emulated" => CheckedDevice::Emulated,
            index => CheckedDevice::Gpu(index.into()),
        };
        for folder in ["logs", "profiles"] {
            let folder = arguments.out.join(folder);
            fs::create_dir_all(&folder).map_err(StageError::io("make", &folder))?;
        }
        let absolute = |path: &Path| fs::canonicalize(path).map_err(StageError::io("find", path));
        let out = absolute(&arguments.out)?;
        if device == CheckedDevice::Emulated && out.ends_with("target/measurements") {
            let why = "a rehearsal on the emulated device measures nothing; give another folder than target/measurements";
            return Err(StageError::Unusable(why.into()));
        }
        let found = models::find(&absolute(&arguments.models)?, &arguments.only)?;
        let (mut halves, mut models): (Vec<_>, Vec<_>) = found.into_iter().partition(MeasuredModel::is_half);
        let mut others = Vec::new();
        if arguments.quick {
            others.extend(models.split_off(models.len().min(2)));
            others.extend(halves.split_off(halves.len().min(1)));
        }
        let bin_dir = absolute(&arguments.bin_dir)?;
        let Arguments { scale, rounds, quick, again, .. } = *arguments;
        Ok(Self {
            bin_dir,
            out,
            device,
            models,
            halves,
            others,
            mixes: arguments.mixes.clone(),
            scale,
            scenarios: arguments.scenarios.clone(),
            policies: arguments.policies.clone(),
            rounds,
            quick,
            again,
        })
    }

    /// The binaries under test.
    pub(crate) fn supervisor(&self) -> PathBuf {
        self.bin_dir.join("shadowslice")
    }

    /// The worker's binary.
    pub(crate) fn worker(&self) -> PathBuf {
        self.bin_dir.join("shadowslice-worker")
    }

    /// The models' names.
    pub(crate) fn names(&self) -> Vec<String> {
        self.models.iter().map(|model| model.name.clone()).collect()
    }

    /// Where a log goes.
    pub(crate) fn log(&self, name: &str) -> PathBuf {
        self.out.join("logs").join(format!("{name}.log"))
    }

    /// Keeps something beside the logs.
    pub(crate) fn keep(&self, name: &str, text: &str) -> Result<(), StageError> {
        let path = self.out.join("logs").join(name);
        fs::write(&path, text).map_err(StageError::io("write", &path))
    }

    /// As many as asked for, fewer in a quick run.
    pub(crate) fn count(&self, full: usize, quick: usize) -> usize {
        if self.quick { quick } else { full }
    }
}

/// Runs a program to its end, adds its stderr to a log, and returns its output.
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
    let Ok(ended) = timeout(within, child.wait_with_output()).await else {
        return Err(StageError::Endless { program, within });
    };
    let output = ended.map_err(failed)?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        let said =
            format!("{}; {}", last_line(&output.stdout), last_line(&fs::read(log).unwrap_or_default()));
        Err(StageError::Program { program, status: output.status, said })
    }
}

/// How long nvidia-smi may take.
const SMI_WITHIN: Duration = Duration::from_secs(10);

/// One field of nvidia-smi's output for the GPU, without its unit.
pub(crate) async fn smi(setting: &CheckSettings, index: &str, field: &str) -> Result<String, StageError> {
    let mut command = Command::new("nvidia-smi");
    command.args(["-i", index, &format!("--query-gpu={field}"), "--format=csv,noheader,nounits"]);
    Ok(output(command, SMI_WITHIN, &setting.log("nvidia-smi")).await?.trim().to_owned())
}

/// A program and all processes that it started; they are killed if the program is given up.
#[derive(Debug)]
pub(crate) struct ProcessFamily(Option<ProcessHandle>);

impl ProcessFamily {
    /// That of a running child.
    pub(crate) fn of(child: &Child) -> Self {
        Self(child.id().and_then(|pid| i32::try_from(pid).ok()).and_then(ProcessHandle::of))
    }
}

impl Drop for ProcessFamily {
    fn drop(&mut self) {
        let Some(own) = self.0.filter(|own| own.alive()) else { return };
        let others = descendants(own.pid);
        // Both fail only for processes that are gone, which need no signal.
        let _ = own.signal(Signal::SIGKILL);
        for other in others {
            let _ = other.signal(Signal::SIGKILL);
        }
    }
}

/// The last error that a program named, else its last words.
fn last_line(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    let error = text.lines().rfind(|line| line.starts_with("error:"));
    error.or(text.lines().rfind(|line| !line.trim().is_empty())).unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_program_that_does_not_end_takes_its_children_along() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 60 & echo $! > child; wait"]).current_dir(folder.path());
        let ended = output(command, Duration::from_secs(2), &log).await;
        assert!(matches!(ended, Err(StageError::Endless { .. })), "{ended:?}");
        let child = fs::read_to_string(folder.path().join("child")).unwrap().trim().parse().unwrap();
        let gone = async {
            let mut look = tokio::time::interval(Duration::from_millis(10));
            while ProcessHandle::of(child).is_some() {
                look.tick().await;
            }
        };
        timeout(Duration::from_secs(10), gone).await.expect("it was killed");
    }

    #[tokio::test]
    async fn what_a_program_said_last_is_in_the_error() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let mut command = Command::new("sh");
        command.args(["-c", "echo first >&2; echo second >&2; exit 3"]);
        let said = output(command, Duration::from_secs(10), &log).await.unwrap_err().to_string();
        assert!(said.contains("second") && said.contains("exit status: 3"), "{said}");
        let mut command = Command::new("sh");
        command.args(["-c", "echo fine"]);
        assert_eq!(output(command, Duration::from_secs(10), &log).await.unwrap(), "fine\n");
    }
}
