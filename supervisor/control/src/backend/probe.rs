//! Probes what a CUDA process finds in an environment. `shadowslice-worker --probe` does this,
//! because the supervisor opens no CUDA context and loads no vendor library except NVML.

use std::path::Path;
use std::time::Duration;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use shadowslice_shared::groups::Division;

use super::command::{self, CommandError};
use super::{NO_TELEMETRY, Variables};
use crate::process::python_variables;

/// The time within which a probe must end. A driver that is not kept loaded takes seconds to start.
const PROBE_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Probed {
    pub sms: u32,
    pub uuid: String,
    pub name: String,
    /// The CUDA version of the driver, for example 13000.
    pub driver: u32,
    /// The total memory in bytes, like `memory_free`.
    pub memory_total: u64,
    pub memory_free: u64,
}

/// The duration of a short kernel next to another process that keeps half of the GPU's groups busy.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct IsolationProbe {
    pub division: Division,
    /// The duration in us on the other half, before that process started.
    pub alone_us: f64,
    /// The duration in us on the other half.
    pub apart_us: f64,
    /// The duration in us on the same half.
    pub together_us: f64,
}

/// The libraries that a worker can load. Errors are those of the dynamic linker or of ONNX Runtime.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct ProbedLibraries {
    pub libcuda: Result<(), String>,
    pub cudnn: Result<(), String>,
    /// The result for ONNX Runtime, or `None` if no file was given.
    pub onnxruntime: Option<Result<OnnxRuntime, String>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct OnnxRuntime {
    /// The minor version, for example 31 for version 1.31.
    pub minor: Option<u32>,
    /// The result for the CUDA provider, with the major version of its CUDA, for example 13.
    pub cuda: Result<Option<u32>, String>,
    pub tensorrt: Result<(), String>,
}

/// The maximum duration of a kernel next to a process on other groups, relative to its duration
/// alone.
const MAX_APART_RATIO: f64 = 2.0;

/// The minimum duration of a kernel next to a process on the same groups, relative to its duration
/// alone. The kernels of the other process take a hundred times as long.
const MIN_TOGETHER_RATIO: f64 = 5.0;

impl IsolationProbe {
    /// Returns the division, or the reason why partitions are not reliable on this GPU.
    pub fn proven(self) -> Result<Division, String> {
        let Self { division, alone_us, apart_us, together_us } = self;
        let times = format!("{alone_us:.0} us alone, {apart_us:.0} apart, {together_us:.0} together");
        if apart_us > MAX_APART_RATIO * alone_us {
            return Err(format!("partitions without a common group of SMs slow each other down ({times})"));
        }
        if together_us < MIN_TOGETHER_RATIO * alone_us {
            return Err(format!("groups of SMs differ between two processes ({times})"));
        }
        Ok(division)
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ProbeRunError {
    #[error("cannot run `shadowslice-worker --probe`; after a timeout, check `nvidia-smi` and `dmesg`")]
    Run(#[source] CommandError),
    #[error("`shadowslice-worker --probe` failed: {0}")]
    Refused(String),
    #[error(
        "unexpected output of `shadowslice-worker --probe`: {said:?}; install both programs from one build"
    )]
    Unclear {
        said: String,
        #[source]
        source: serde_json::Error,
    },
}

pub async fn probe(program: &Path, environment: &Variables) -> Result<Probed, ProbeRunError> {
    ask(program, &["--probe"], environment).await
}

/// Measures whether the partitions of two processes are isolated in this environment.
pub async fn isolation(program: &Path, environment: &Variables) -> Result<IsolationProbe, ProbeRunError> {
    ask(program, &["--probe", "partitions"], environment).await
}

/// Returns the libraries that a worker can load, with ONNX Runtime from this file.
pub async fn libraries(program: &Path, onnxruntime: Option<&Path>) -> Result<ProbedLibraries, ProbeRunError> {
    let path = onnxruntime.map(Path::to_string_lossy);
    let arguments = ["--probe", "libraries"].into_iter().chain(path.as_deref()).collect::<Vec<_>>();
    let (name, value) = NO_TELEMETRY;
    ask(program, &arguments, &vec![(name, value.to_owned())]).await
}

/// Returns the fault that the package for Python models finds in a model's file, if any. The
/// package imports the file, which can write to the folder `temporary`.
pub async fn python_fault(
    interpreter: &Path,
    package: &Path,
    model: &Path,
    temporary: &Path,
) -> Result<Option<String>, CommandError> {
    let (model, temporary) = (model.to_string_lossy(), temporary.to_string_lossy());
    let variables = python_variables(package, std::env::var_os("PYTHONPATH"));
    let variables = variables.map(|(name, value)| (name, value.to_string_lossy().into_owned())).to_vec();
    let arguments = ["-m", "shadowslice.check", &model, &temporary];
    let said = command::run(interpreter, &arguments, &variables, "", PROBE_TIMEOUT).await?;
    let fault = [said.out.trim(), said.err.trim()].into_iter().find(|said| !said.is_empty());
    Ok((!said.status.success()).then(|| fault.unwrap_or("cannot import the model").to_owned()))
}

async fn ask<T: DeserializeOwned>(
    program: &Path,
    arguments: &[&str],
    environment: &Variables,
) -> Result<T, ProbeRunError> {
    let said =
        command::run(program, arguments, environment, "", PROBE_TIMEOUT).await.map_err(ProbeRunError::Run)?;
    if !said.status.success() {
        let why = said.err.trim().trim_start_matches("error: ");
        let why = if why.is_empty() { said.status.to_string() } else { why.to_owned() };
        return Err(ProbeRunError::Refused(why));
    }
    serde_json::from_str(said.out.trim())
        .map_err(|source| ProbeRunError::Unclear { said: said.out.trim().to_owned(), source })
}

#[cfg(test)]
mod tests {
    use shadowslice_shared::units::Sms;

    use super::*;

    #[test]
    fn partitions_are_relied_on_only_where_they_keep_apart_and_meet_as_they_should() {
        let proven = |alone_us, apart_us, together_us| {
            let division = Division::of(Sms(132)).unwrap();
            IsolationProbe { division, alone_us, apart_us, together_us }.proven()
        };
        assert!(proven(60.0, 62.0, 3000.0).is_ok());
        assert!(proven(60.0, 3000.0, 3000.0).unwrap_err().contains("slow each other down"));
        assert!(proven(60.0, 60.0, 62.0).unwrap_err().contains("differ between two processes"));
    }
}
