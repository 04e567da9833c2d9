//! What a CUDA process finds in a given environment. `shadowslice-worker --probe` finds out, since
//! the supervisor opens no CUDA context and loads no vendor's libraries but NVML.

use std::path::Path;
use std::time::Duration;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use shadowslice_shared::groups::Division;

use super::command::{self, CommandError};
use super::{Environment, NO_TELEMETRY};
use crate::process::python_variables;

/// How long a probe may take: a driver that is not kept loaded takes seconds to come up.
const LIMIT: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Probed {
    pub sms: u32,
    pub uuid: String,
    pub name: String,
    /// The version of CUDA that the driver speaks, e.g. 13000.
    pub driver: u32,
    /// In bytes, as is `memory_free`.
    pub memory_total: u64,
    pub memory_free: u64,
}

/// How a short kernel fared beside another process that held half of the GPU's groups.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Isolation {
    pub division: Division,
    /// On the other half, before that process was there, in us.
    pub alone_us: f64,
    /// On the other half.
    pub apart_us: f64,
    /// On the same half.
    pub together_us: f64,
}

/// Which libraries a worker can load; an error is in the words of the dynamic linker or of ONNX
/// Runtime.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Libraries {
    pub libcuda: Result<(), String>,
    pub cudnn: Result<(), String>,
    /// `None` if no file was named.
    pub onnxruntime: Option<Result<OnnxRuntime, String>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct OnnxRuntime {
    /// 31 for version 1.31.
    pub minor: Option<u32>,
    /// The provider for CUDA, and the CUDA that it uses, e.g. 13.
    pub cuda: Result<Option<u32>, String>,
    pub tensorrt: Result<(), String>,
}

/// Beside a process on other groups, a kernel may take at most so many times as long as alone.
const APART: f64 = 2.0;

/// Beside a process on the same groups, it takes at least so many times as long as alone: the other
/// process's kernels take a hundred times as long.
const TOGETHER: f64 = 5.0;

impl Isolation {
    /// An error says why partitions cannot be relied on.
    pub fn proven(self) -> Result<Division, String> {
        let Self { division, alone_us, apart_us, together_us } = self;
        let times = format!("{alone_us:.0} us alone, {apart_us:.0} apart, {together_us:.0} together");
        if apart_us > APART * alone_us {
            return Err(format!("partitions without a common group of SMs slow each other down ({times})"));
        }
        if together_us < TOGETHER * alone_us {
            return Err(format!("groups of SMs differ between two processes ({times})"));
        }
        Ok(division)
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
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

pub async fn probe(program: &Path, environment: &Environment) -> Result<Probed, ProbeError> {
    ask(program, &["--probe"], environment).await
}

/// Measures whether partitions of two processes keep apart in these surroundings.
pub async fn isolation(program: &Path, environment: &Environment) -> Result<Isolation, ProbeError> {
    ask(program, &["--probe", "partitions"], environment).await
}

/// With ONNX Runtime from this file.
pub async fn libraries(program: &Path, onnxruntime: Option<&Path>) -> Result<Libraries, ProbeError> {
    let path = onnxruntime.map(Path::to_string_lossy);
    let arguments = ["--probe", "libraries"].into_iter().chain(path.as_deref()).collect::<Vec<_>>();
    let (name, value) = NO_TELEMETRY;
    ask(program, &arguments, &vec![(name, value.to_owned())]).await
}

/// What the package of Python models' workers finds wrong with a model's file, which is imported
/// with this folder to write to.
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
    let said = command::run(interpreter, &arguments, &variables, "", LIMIT).await?;
    let fault = [said.out.trim(), said.err.trim()].into_iter().find(|said| !said.is_empty());
    Ok((!said.status.success()).then(|| fault.unwrap_or("cannot import the model").to_owned()))
}

async fn ask<T: DeserializeOwned>(
    program: &Path,
    arguments: &[&str],
    environment: &Environment,
) -> Result<T, ProbeError> {
    let said = command::run(program, arguments, environment, "", LIMIT).await.map_err(ProbeError::Run)?;
    if !said.status.success() {
        let why = said.err.trim().trim_start_matches("error: ");
        let why = if why.is_empty() { said.status.to_string() } else { why.to_owned() };
        return Err(ProbeError::Refused(why));
    }
    serde_json::from_str(said.out.trim())
        .map_err(|source| ProbeError::Unclear { said: said.out.trim().to_owned(), source })
}

#[cfg(test)]
mod tests {
    use shadowslice_shared::units::Sms;

    use super::*;

    #[test]
    fn partitions_are_relied_on_only_where_they_keep_apart_and_meet_as_they_should() {
        let proven = |alone_us, apart_us, together_us| {
            let division = Division::of(Sms(132)).unwrap();
            Isolation { division, alone_us, apart_us, together_us }.proven()
        };
        assert!(proven(60.0, 62.0, 3000.0).is_ok());
        assert!(proven(60.0, 3000.0, 3000.0).unwrap_err().contains("slow each other down"));
        assert!(proven(60.0, 60.0, 62.0).unwrap_err().contains("differ between two processes"));
    }
}
