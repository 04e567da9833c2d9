//! The program behind `make gpu-check`, which tests shadowslice on a GPU host. It runs in stages
//! that can be resumed, and writes its figures as JSON and Markdown. It runs the real binaries and
//! communicates with them over their sockets.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "it writes to its user's terminal")]

mod contention;
mod error;
mod figures;
mod gpus;
mod handover;
mod host;
mod lossless;
mod memory;
mod models;
mod mps;
mod neighbours;
mod numbers;
mod pairs;
mod partitions;
mod policies;
mod profiles;
mod python;
mod report;
mod serving;
mod sms;
mod stages;
mod sweep;
mod tools;
mod traffic;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use clap::builder::PossibleValuesParser;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::Instant;

use crate::error::{StageError, chain};
use crate::figures::FigureStore;
use crate::stages::CheckStage;
use crate::tools::CheckSettings;

/// Measures shadowslice on a GPU host and writes the figures to gpu.json and gpu.md.
///
/// The check skips a stage that already has figures from the same binaries. If a stage fails, the
/// check records the reason and continues. The exit status is 0 only if no stage failed.
#[derive(Debug, Parser)]
struct Arguments {
    /// The folder of `shadowslice` and `shadowslice-worker`.
    #[arg(long)]
    bin_dir: PathBuf,
    /// The folder of the models, each as NAME.onnx.
    #[arg(long)]
    models: PathBuf,
    /// The folder for figures, profiles and logs.
    #[arg(long)]
    out: PathBuf,
    /// The stages to run, in this order [default: all stages, or `mixes` with --mixes].
    #[arg(long, value_delimiter = ',')]
    stages: Vec<CheckStage>,
    /// Use fewer models, shares and repetitions.
    #[arg(long)]
    quick: bool,
    /// Repeat the stages that already have figures.
    #[arg(long)]
    again: bool,
    /// The index of the GPU, or `emulated` for a rehearsal without a GPU.
    #[arg(long, default_value = "0")]
    device: String,
    /// Use only these models.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Run only the mix of this name in the stages `policies` and `mixes`; you can repeat this option.
    #[arg(long = "scenario")]
    scenarios: Vec<String>,
    /// A YAML file with mixes for the stage `mixes`, instead of the mixes in tests/gpu/mixes; you
    /// can repeat this option.
    #[arg(long = "mixes")]
    mixes: Vec<PathBuf>,
    /// The factor for the rates of all open-loop clients, which do not wait for answers.
    #[arg(long, default_value_t = 1.0, value_parser = positive)]
    scale: f64,
    /// Print the names of the models that the files of `--mixes` use, and run no stage.
    #[arg(long, requires = "mixes")]
    list_models: bool,
    /// Run only this policy in the stages `policies` and `mixes`; you can repeat this option.
    #[arg(long = "policy", value_parser = PossibleValuesParser::new(policies::names()))]
    policies: Vec<String>,
    /// The number of rounds in which the stages `policies` and `mixes` measure each policy. Every
    /// second round runs the policies in reverse order, so that a host that is busy at times
    /// affects all policies.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// The time limit of the whole run, in seconds. Stages that run out of time end early, and keep
    /// their measurements.
    #[arg(long, default_value_t = 3600, value_parser = clap::value_parser!(u64).range(10..=86_400))]
    seconds: u64,
}

#[tokio::main]
async fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let result = tokio::select! {
        result = check(&arguments) => result,
        why = stop_signal() => Err(StageError::Unusable(why)),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {}", chain(&error));
            ExitCode::FAILURE
        }
    }
}

/// Waits for SIGINT or SIGTERM, and returns its name. The check handles these signals so that it
/// can stop the processes that it started.
async fn stop_signal() -> String {
    let Ok(mut terminate) = signal(SignalKind::terminate()) else {
        return "cannot wait for signals".into();
    };
    tokio::select! {
        _ = tokio::signal::ctrl_c() => "interrupted".into(),
        _ = terminate.recv() => "terminated".into(),
    }
}

fn positive(text: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number: &f64| number.is_finite() && *number > 0.0);
    number.ok_or_else(|| "not a number above 0".into())
}

/// Runs the stages. Returns true if no stage failed.
async fn check(arguments: &Arguments) -> Result<bool, StageError> {
    if arguments.list_models {
        policies::models_of(&arguments.mixes)?.iter().for_each(|name| println!("{name}"));
        return Ok(true);
    }
    let settings = CheckSettings::new(arguments)?;
    let mut figures = FigureStore::open(&arguments.out, &settings)?;
    let stages: &[CheckStage] = match arguments.stages.as_slice() {
        [] if !arguments.mixes.is_empty() => &[CheckStage::Mixes],
        [] => &CheckStage::ALL,
        stages => stages,
    };
    let end = Instant::now() + Duration::from_secs(arguments.seconds);
    stages::run_all(stages, &settings, &mut figures, end).await
}
