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

use crate::{Failure, finish};

/// Measures how costs grow with the load, and writes a page.
#[derive(Debug, Parser)]
#[command(name = "shadowslice-growth")]
struct Options {
    /// The folder of the binaries to measure [default: the folder of this program]
    #[arg(long, value_name = "DIR")]
    binaries: Option<PathBuf>,
    /// The name of the binaries on the page [default: the checked-out version]
    #[arg(long)]
    name: Option<String>,
    /// The length of a round, in seconds
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// The rounds of each row; the page shows the round with the median requests per second
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// The numbers of requests after which memory is read; each number adds to the previous ones
    #[arg(long, value_delimiter = ',', default_value = "10000,100000,1000000")]
    requests: Vec<u64>,
    /// The time over which an idle supervisor's CPU time is measured, in seconds
    #[arg(long, default_value_t = 20.0)]
    idle_seconds: f64,
    /// The time without clients before the last reading of memory, in seconds; the allocator may
    /// release memory meanwhile
    #[arg(long, default_value_t = 15.0)]
    rest_seconds: f64,
    /// The parts to measure
    #[arg(long, value_delimiter = ',', default_value = "sweep,memory,idle")]
    parts: Vec<Part>,
    /// Measure only the rows of the sweep whose setting contains this text, such as `64000000 B`
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,
    /// The file for the page [default: only print the tables]
    #[arg(long)]
    page: Option<PathBuf>,
}

/// The parts of the measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    Sweep,
    Memory,
    Idle,
}

/// The whole program, as its command line says.
pub fn growth() -> ExitCode {
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
struct Found {
    sweep: Vec<sweep::Row>,
    memory: Vec<memory::Row>,
    idle: Vec<idle::Idle>,
}

async fn run(options: &Options) -> Result<(), Failure> {
    let program = std::env::current_exe()?;
    let own = || program.parent().map(PathBuf::from);
    let binaries = options.binaries.clone().or_else(own).ok_or("this program has no folder")?;
    let span = Duration::try_from_secs_f64(options.seconds)?;
    let mut found = Found::default();
    if options.parts.contains(&Part::Sweep) {
        found.sweep = sweep::all(&binaries, span, options.rounds, &options.only).await?;
    }
    if options.parts.contains(&Part::Memory) {
        found.memory =
            memory::all(&binaries, &options.requests, Duration::try_from_secs_f64(options.rest_seconds)?)
                .await?;
    }
    if options.parts.contains(&Part::Idle) {
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
