//! Whether costs grow faster than the load: more models, more connections, larger tensors, more
//! requests; and the costs of an idle supervisor.

mod idle;
mod memory;
mod page;
mod sweep;

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;

use crate::{MeasureError, finish};

/// Looks for cliffs, and writes a page.
#[derive(Debug, Parser)]
#[command(name = "shadowslice-scaling")]
struct Options {
    /// The folder of the binaries to measure [default: this program's]
    #[arg(long, value_name = "DIR")]
    binaries: Option<PathBuf>,
    /// What the page calls the binaries [default: what is checked out]
    #[arg(long)]
    name: Option<String>,
    /// Seconds of one round
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Rounds of each row, of which the one with the median of requests per second is shown
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Requests after which memory is read, each number on top of the ones before
    #[arg(long, value_delimiter = ',', default_value = "10000,100000,1000000")]
    requests: Vec<u64>,
    /// Seconds over which an idle supervisor's CPU time is read
    #[arg(long, default_value_t = 20.0)]
    idle_seconds: f64,
    /// Seconds without clients before memory is read a last time, in which an allocator may give back what it kept
    #[arg(long, default_value_t = 15.0)]
    rest_seconds: f64,
    /// Only these parts
    #[arg(long, value_delimiter = ',', default_value = "sweep,memory,idle")]
    parts: Vec<ScalingPart>,
    /// Only rows of the sweep with this text in their setting's name, such as `64000000 B`
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,
    /// Where the page goes; without it the tables are only shown
    #[arg(long)]
    page: Option<PathBuf>,
}

/// The parts of the measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum ScalingPart {
    Sweep,
    Memory,
    Idle,
}

/// The whole program, as its command line says.
pub fn scaling() -> ExitCode {
    let options = Options::parse();
    finish(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            tokio::select! {
                measured = run(&options) => measured,
                _ = tokio::signal::ctrl_c() => Err("interrupted".into()),
            }
        })
    })
}

/// Everything that was measured, part by part.
#[derive(Default)]
struct ScalingResults {
    sweep: Vec<sweep::SweepRow>,
    memory: Vec<memory::MemoryRow>,
    idle: Vec<idle::IdleCost>,
}

async fn run(options: &Options) -> Result<(), MeasureError> {
    let program = std::env::current_exe()?;
    let own = || program.parent().map(PathBuf::from);
    let binaries = options.binaries.clone().or_else(own).ok_or("this program has no folder")?;
    let span = Duration::try_from_secs_f64(options.seconds)?;
    let mut found = ScalingResults::default();
    if options.parts.contains(&ScalingPart::Sweep) {
        found.sweep = sweep::all(&binaries, span, options.rounds, &options.only).await?;
    }
    if options.parts.contains(&ScalingPart::Memory) {
        found.memory =
            memory::all(&binaries, &options.requests, Duration::try_from_secs_f64(options.rest_seconds)?)
                .await?;
    }
    if options.parts.contains(&ScalingPart::Idle) {
        let span = Duration::try_from_secs_f64(options.idle_seconds)?;
        for policy in idle::POLICIES {
            found.idle.push(idle::idle(&binaries, policy, span).await?);
        }
    }
    println!("{}", page::tables(&found));
    if let Some(path) = &options.page {
        fs::write(path, page::of(&found, options.name.clone()))
            .map_err(|error| format!("cannot write {}: {error}", path.display()))?;
        println!("the page: {}", path.display());
    }
    Ok(())
}
