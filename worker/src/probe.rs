//! `shadowslice-worker --probe`: what a process finds on the GPU that its environment shows it, as
//! one line of JSON. The supervisor and measurements use it, so that they need no CUDA of their
//! own.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use serde::Serialize;
use serde_json::json;
use shadowslice_shared::batch::IN_FLIGHT;
use shadowslice_shared::boot::{BootRefusal, EngineSpec, Provider, WarmUp};
use shadowslice_shared::groups::Groups;
use shadowslice_shared::slab::{AnswerSlab, AnswerWriter, ReadableSlab, SlabError};
use shadowslice_shared::units::Percent;

use crate::answer::AnswerSlots;
use crate::device::cuda::{CudaFault, CudaGpu, isolation, microbenchmarks};
use crate::engine::{Engine, Libraries, Signature};
use crate::proof::{self, Trial, Unproven};

/// Room for the answers of one small batch, in bytes.
const ANSWER_BYTES: u64 = 64 << 20;

/// What to find out.
#[derive(Debug, PartialEq, Eq)]
pub enum Probe {
    /// What the GPU is, and how long it took to open it.
    Facts,
    /// What green contexts cost.
    Green,
    /// Whether partitions of two processes keep apart.
    Partitions,
    /// The other process of [`Probe::Partitions`].
    Hold(Groups),
    /// What opening another process's memory costs.
    Ipc,
    /// The other process of [`Probe::Ipc`].
    IpcOpen([u8; 64]),
    /// How long a process takes from its share to its first answer if all libraries have been loaded before.
    Blank {
        /// The model.
        model: PathBuf,
        /// The share.
        share: Percent,
        /// ONNX Runtime's library.
        library: PathBuf,
    },
}

/// Why there is no result.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// The GPU, the library or the model failed.
    #[error(transparent)]
    Refused(#[from] BootRefusal),
    /// The model's first run failed.
    #[error(transparent)]
    Unproven(#[from] Unproven),
    /// The GPU failed later.
    #[error("the GPU cannot be probed")]
    Gpu(#[from] CudaFault),
    /// The GPU's partitions failed.
    #[error(transparent)]
    Isolation(#[from] isolation::IsolationError),
    /// Memory for answers is not there.
    #[error("there is no memory for answers")]
    Slab(#[from] SlabError),
    /// The other process failed.
    #[error("another process cannot be asked")]
    Other(#[from] std::io::Error),
    /// The other process's output, or this result, is no JSON.
    #[error("the findings are no JSON; did the other process fail?")]
    Json(#[from] serde_json::Error),
}

impl Probe {
    /// Reads a command line after `--probe`; `None` if it is no valid one. `library` comes from the
    /// environment.
    pub fn read(arguments: &[String], library: Option<PathBuf>) -> Option<Self> {
        let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
        match words[..] {
            [] => Some(Self::Facts),
            ["green"] => Some(Self::Green),
            ["partitions"] => Some(Self::Partitions),
            ["hold", groups] => groups.parse().ok().map(Groups::from_bits).map(Self::Hold),
            ["ipc"] => Some(Self::Ipc),
            ["ipc-open", handle] => bytes(handle).map(Self::IpcOpen),
            ["blank", model, share] => Some(Self::Blank {
                model: model.into(),
                share: share.parse().ok().and_then(|share| Percent::new(share).ok())?,
                library: library?,
            }),
            _ => None,
        }
    }

    /// Finds it out; returns one line of JSON.
    pub fn run(self) -> Result<String, ProbeError> {
        match self {
            Self::Facts => facts(),
            Self::Green => line(&microbenchmarks::green(&*CudaGpu::open()?)?),
            Self::Partitions => {
                let mut holder = Command::new(std::env::current_exe()?);
                holder.args(["--probe", "hold"]);
                line(&isolation::measure(&*CudaGpu::open()?, holder)?)
            }
            Self::Hold(groups) => {
                isolation::hold(&*CudaGpu::open()?, groups)?;
                line(&json!({}))
            }
            Self::Ipc => {
                let mut opener = Command::new(std::env::current_exe()?);
                opener.args(["--probe", "ipc-open"]);
                let said = microbenchmarks::share_memory(&*CudaGpu::open()?, opener)??;
                line(&serde_json::from_slice::<microbenchmarks::IpcTimes>(&said)?)
            }
            Self::IpcOpen(handle) => {
                let _gpu = CudaGpu::open()?;
                line(&microbenchmarks::open_shared(&handle)?)
            }
            Self::Blank { model, share, library } => blank(model, share, library),
        }
    }
}

fn facts() -> Result<String, ProbeError> {
    let begun = Instant::now();
    microbenchmarks::initialise()?;
    let init_ms = ms(begun);
    let begun = Instant::now();
    let gpu = CudaGpu::open()?;
    let context_ms = ms(begun);
    let mut facts = serde_json::to_value(microbenchmarks::facts(&gpu)?)?;
    facts["init_ms"] = json!(init_ms);
    facts["context_ms"] = json!(context_ms);
    line(&facts)
}

fn blank(model: PathBuf, share: Percent, library: PathBuf) -> Result<String, ProbeError> {
    let spec = EngineSpec::OnnxRuntime {
        library,
        path: model,
        threads: 1,
        providers: vec![Provider::Cuda],
        optimised: None,
    };
    let begun = Instant::now();
    let libraries = Libraries::load(&spec, true)?;
    let libraries_ms = ms(begun);
    microbenchmarks::set_share(share);
    let begun = Instant::now();
    let gpu = CudaGpu::open()?;
    let context_ms = ms(begun);
    let begun = Instant::now();
    let (mut engine, signature) = Engine::load(&spec, &libraries, (Some(gpu.clone()), None), false)?;
    let session_ms = ms(begun);
    let begun = Instant::now();
    run_once(&mut engine, &signature)?;
    let first_run_ms = ms(begun);
    let begun = Instant::now();
    run_once(&mut engine, &signature)?;
    let next_run_ms = ms(begun);
    line(&json!({
        "sms": gpu.sms().0,
        "libraries_ms": libraries_ms,
        "context_ms": context_ms,
        "session_ms": session_ms,
        "first_run_ms": first_run_ms,
        "next_run_ms": next_run_ms,
    }))
}

/// Runs a batch of one row, with 1 for every axis that the model leaves open.
fn run_once(engine: &mut Engine, signature: &Signature) -> Result<(), ProbeError> {
    let slab = AnswerSlab::create("shadowslice-probe", ANSWER_BYTES * IN_FLIGHT as u64)?;
    let slots = AnswerSlots::new(AnswerWriter::map(slab.as_fd(), slab.bytes())?, ANSWER_BYTES);
    let answers = ReadableSlab::map(slab.as_fd(), slab.bytes())?;
    let shape = |shape: &Vec<i64>| shape.iter().skip(1).map(|&axis| axis.max(1)).collect();
    let shapes = signature.inputs.iter().map(|input| shape(&input.shape)).collect();
    let warm_up = WarmUp { batched: true, sizes: vec![1], shapes };
    let (slots, answers, warm_up, slots_tried) = (&slots, &answers, &warm_up, IN_FLIGHT as u8);
    let inputs = BTreeMap::new();
    let mut trial = Trial { engine, signature, slots, answers, warm_up, socket: None, slots_tried, inputs };
    Ok(proof::warm(&mut trial, None)?)
}

/// 64 bytes from their hexadecimal digits.
fn bytes(hex: &str) -> Option<[u8; 64]> {
    let pairs = hex.as_bytes().chunks(2).map(|pair| {
        let pair = std::str::from_utf8(pair).ok().filter(|pair| pair.len() == 2)?;
        u8::from_str_radix(pair, 16).ok()
    });
    pairs.collect::<Option<Vec<u8>>>()?.try_into().ok()
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
        Probe::read(&words, Some("libonnxruntime.so".into()))
    }

    #[test]
    fn command_lines_are_read_or_refused() {
        assert_eq!(read(""), Some(Probe::Facts));
        assert_eq!(read("green"), Some(Probe::Green));
        assert!(matches!(read("blank model.onnx 30"), Some(Probe::Blank { .. })));
        assert_eq!(read("blank model.onnx 101"), None);
        let handle = "0f".repeat(64);
        assert_eq!(read(&format!("ipc-open {handle}")), Some(Probe::IpcOpen([15; 64])));
        assert_eq!(read(&format!("ipc-open {}", &handle[1..])), None);
        assert_eq!(read("ipc-open zz"), None);
        assert_eq!(read("hold 5"), Some(Probe::Hold(Groups::from_bits(5))));
        assert_eq!(read("hold -1"), None);
        assert_eq!(read("what"), None);
    }
}
