//! The command `shadowslice-worker --probe`. It prints one line of JSON about this process's GPU
//! and about the libraries that this process can load. The supervisor and the measurements run this
//! command, so they do not need CUDA themselves.

use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use serde::Serialize;
use serde_json::json;
use shadowslice_shared::boot::BootRefusal;
use shadowslice_shared::groups::Groups;

use crate::device::cuda::{self, CudaError, CudaGpu, isolation};
use crate::engine::try_libraries;
use crate::sandbox;

/// The probes of `shadowslice-worker --probe`.
#[derive(Debug, PartialEq, Eq)]
pub enum Probe {
    /// The GPU's properties, and the time that it takes to open the GPU.
    Facts,
    /// A test that partitions of two processes do not overlap.
    Partitions,
    /// The second process of [`Probe::Partitions`], which keeps these groups busy.
    Hold(Groups),
    /// The libraries that this process can load. The field is the path of ONNX Runtime's library.
    Libraries(Option<PathBuf>),
    /// A test that a worker's sandbox prevents attacks on the given process, socket and file.
    Sandbox { pid: i32, socket: PathBuf, file: PathBuf },
}

#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    #[error(transparent)]
    Refused(#[from] BootRefusal),
    #[error("cannot probe the GPU; check `nvidia-smi`, and look for Xid errors in `dmesg`")]
    Gpu(#[from] CudaError),
    #[error(transparent)]
    Isolation(#[from] isolation::IsolationError),
    #[error("cannot find the path of the worker's program")]
    OwnFile(#[source] std::io::Error),
    #[error("cannot encode the findings as JSON; please report this bug")]
    Json(#[from] serde_json::Error),
}

impl Probe {
    pub fn read(arguments: &[String]) -> Option<Self> {
        let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
        match words[..] {
            [] => Some(Self::Facts),
            ["partitions"] => Some(Self::Partitions),
            ["hold", groups] => groups.parse().ok().map(Groups::from_bits).map(Self::Hold),
            ["libraries"] => Some(Self::Libraries(None)),
            ["walls", pid, socket, file] => {
                pid.parse().ok().map(|pid| Self::Sandbox { pid, socket: socket.into(), file: file.into() })
            }
            ["libraries", path] => Some(Self::Libraries(Some(path.into()))),
            _ => None,
        }
    }

    /// Runs the probe, and returns its findings as one line of JSON.
    pub fn run(self) -> Result<String, ProbeError> {
        match self {
            Self::Facts => facts(),
            Self::Partitions => {
                let mut holder = Command::new(std::env::current_exe().map_err(ProbeError::OwnFile)?);
                holder.args(["--probe", "hold"]);
                line(&isolation::measure(&*CudaGpu::open()?, holder)?)
            }
            Self::Hold(groups) => {
                isolation::hold(&*CudaGpu::open()?, groups)?;
                line(&json!({}))
            }
            Self::Sandbox { pid, socket, file } => line(&sandbox::report(pid, &socket, &file)),
            Self::Libraries(onnxruntime) => line(&try_libraries(onnxruntime.as_deref())),
        }
    }
}

fn facts() -> Result<String, ProbeError> {
    let begun = Instant::now();
    cuda::initialise()?;
    let init_ms = ms(begun);
    let begun = Instant::now();
    let gpu = CudaGpu::open()?;
    let context_ms = ms(begun);
    let mut facts = serde_json::to_value(cuda::facts(&gpu)?)?;
    facts["init_ms"] = json!(init_ms);
    facts["context_ms"] = json!(context_ms);
    line(&facts)
}

fn line(findings: &impl Serialize) -> Result<String, ProbeError> {
    Ok(serde_json::to_string(findings)?)
}

fn ms(begun: Instant) -> f64 {
    begun.elapsed().as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(words: &str) -> Option<Probe> {
        let words: Vec<String> = words.split_whitespace().map(str::to_owned).collect();
        Probe::read(&words)
    }

    #[test]
    fn command_lines_are_read_or_refused() {
        assert_eq!(read(""), Some(Probe::Facts));
        assert_eq!(read("partitions"), Some(Probe::Partitions));
        assert_eq!(read("hold 5"), Some(Probe::Hold(Groups::from_bits(5))));
        assert_eq!(read("hold -1"), None);
        assert_eq!(read("libraries"), Some(Probe::Libraries(None)));
        assert_eq!(read("libraries /a/b.so"), Some(Probe::Libraries(Some("/a/b.so".into()))));
        let sandbox = Probe::Sandbox { pid: 7, socket: "/a".into(), file: "/b".into() };
        assert_eq!(read("walls 7 /a /b"), Some(sandbox));
        assert_eq!(read("walls x /a /b"), None);
        assert_eq!(read("what"), None);
    }
}
