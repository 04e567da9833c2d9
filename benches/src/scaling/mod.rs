//! The scaling benchmark. It measures how costs grow with the number of models, connections and
//! requests, and with the size of tensors. It also measures the costs of an idle supervisor.

mod idle;
mod memory;
mod page;
mod sweep;

use std::path::PathBuf;
use std::time::Duration;

use crate::MeasureError;
use crate::system::own_folder;

/// Measure how costs scale with models, connections, tensor sizes and requests, and write a page.
/// With the default options this takes about six minutes on two cores.
#[derive(Debug, clap::Args)]
pub(crate) struct ScalingOptions {
    /// The folder of the binaries to measure [default: the folder of this program]
    #[arg(long, value_name = "DIR")]
    binaries: Option<PathBuf>,
    /// The name of the binaries on the page [default: the commit that is checked out]
    #[arg(long)]
    name: Option<String>,
    /// The length of a round, in seconds
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// The number of rounds of each row. The page shows the round with the median of requests per second
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// The total numbers of requests after which memory is read, in ascending order
    #[arg(long, value_delimiter = ',', default_value = "10000,100000,1000000")]
    requests: Vec<u64>,
    /// The time for which an idle supervisor is measured, in seconds
    #[arg(long, default_value_t = 20.0)]
    idle_seconds: f64,
    /// The time without clients before the last memory reading, in seconds. The allocator may return memory
    /// in that time
    #[arg(long, default_value_t = 15.0)]
    rest_seconds: f64,
    /// The parts to measure
    #[arg(long, value_delimiter = ',', default_value = "sweep,memory,idle")]
    parts: Vec<ScalingPart>,
    /// Measure only rows of the sweep whose setting contains this text, for example `64000000 B`
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,
    /// The file to write the page to. Without it, the program only prints the tables
    #[arg(long)]
    page: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum ScalingPart {
    Sweep,
    Memory,
    Idle,
}

/// The results of each part of the benchmark.
#[derive(Default)]
struct ScalingResults {
    sweep: Vec<sweep::SweepRow>,
    memory: Vec<memory::MemoryRow>,
    idle: Vec<idle::IdleCost>,
}

pub(crate) async fn run(options: &ScalingOptions) -> Result<(), MeasureError> {
    let binaries = options.binaries.clone().map_or_else(own_folder, Ok)?;
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
    page::report(&found, options.name.as_deref()).publish(options.page.as_deref())
}
