//! The echo benchmark, which measures requests per second, latency and CPU time of echo requests.

mod page;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};
use shadowslice_shared::errors;

use crate::closed_loop::RoundResult;
use crate::machine::HostInfo;
use crate::plan::{self, EchoSetting, matching};
use crate::report::save_json;
use crate::servers::EchoServers;
use crate::{MeasureError, bare, finish, until_interrupted};

use page::EchoReport;

/// Measure requests per second, latency and CPU time of echo requests through the whole system.
///
/// Each connection sends a request, waits for its answer, compares every byte, and sends the next
/// one (a closed loop). The settings take turns, so that noise of the machine affects all of them
/// equally. The table shows the median and the range over quiet rounds, in which other programs
/// used at most 10 % of the machine. Without quiet rounds, the table covers all rounds.
/// Bare HTTP and gRPC servers that only echo run in the same rounds as a baseline.
///
/// CPU time is user and system time of the processes, as the kernel counts it. One thread of this
/// process sends the load. The table also shows its CPU time, because it competes with the server.
#[derive(Debug, Parser)]
#[command(name = "cargo bench --bench echo --", args_conflicts_with_subcommands = true)]
struct Arguments {
    #[command(flatten)]
    options: EchoOptions,
    #[command(subcommand)]
    part: Option<Role>,
}

/// The length of a round if `cargo test` runs the benchmarks as tests.
const TEST_ROUND: Duration = Duration::from_millis(50);

#[derive(Debug, Clone, clap::Args)]
struct EchoOptions {
    /// The length of a round of one setting, in seconds
    #[arg(long, env = "SHADOWSLICE_BENCH_SECONDS", default_value = "1", value_parser = seconds)]
    seconds: Duration,
    /// The number of rounds of each setting
    #[arg(long, env = "SHADOWSLICE_BENCH_ROUNDS", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// The total time for which disturbed rounds are repeated, in seconds. A round is disturbed if
    /// other programs used more than 10 % of the machine
    #[arg(long, env = "SHADOWSLICE_BENCH_PATIENCE", default_value = "60", value_parser = patience)]
    patience: Duration,
    /// The numbers of connections to measure
    #[arg(long, env = "SHADOWSLICE_BENCH_CONNECTIONS", default_value = "1,8,32,128", value_name = "N", value_delimiter = ',',
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    connections: Vec<u16>,
    /// Measure only settings whose names contain this text, for example `grpc unix 64 B`
    #[arg(long, env = "SHADOWSLICE_BENCH_ONLY", default_value = "")]
    only: String,
    /// The JSON file to write [default: target/bench/echo.json]
    #[arg(long, env = "SHADOWSLICE_BENCH_JSON")]
    json: Option<PathBuf>,
    /// Measure. `cargo bench` sets this flag. Without it, each setting runs only briefly, as a test
    #[arg(long)]
    bench: bool,
}

/// The subcommands with which this program starts itself as another process.
#[derive(Debug, Subcommand)]
enum Role {
    /// Serve echo requests on sockets in a folder until standard input ends
    #[command(hide = true)]
    Bare { folder: PathBuf },
}

fn seconds(text: &str) -> Result<Duration, String> {
    between(text, 0.05, 3600.0)
}

fn patience(text: &str) -> Result<Duration, String> {
    between(text, 0.0, 86_400.0)
}

fn between(text: &str, least: f64, most: f64) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| (least..=most).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| format!("give a number from {least} to {most}"))
}

/// Runs the echo benchmark with the options of the command line.
pub fn echo() -> ExitCode {
    let Arguments { mut options, part } = Arguments::parse();
    if !options.bench {
        (options.seconds, options.rounds, options.patience) = (TEST_ROUND, 1, Duration::ZERO);
    }
    finish(match part {
        Some(Role::Bare { folder }) => bare::run(&folder).map_err(MeasureError::from),
        None => until_interrupted(measure(&options)),
    })
}

async fn measure(options: &EchoOptions) -> Result<(), MeasureError> {
    let settings = matching(plan::settings(&options.connections), &options.only)?;
    let machine = HostInfo::here();
    let servers = EchoServers::start(&settings).await?;
    let rounds = all_rounds(options, &settings, &servers).await?;
    servers.stop().await?;
    let report = EchoReport::new(machine, options, settings, rounds);
    println!("{report}");
    if let Some(path) = options.json.clone().or_else(|| options.bench.then(default_json)) {
        save_json(&path, &report)?;
    }
    Ok(())
}

/// Runs all rounds of each setting. Every second round runs the settings in the reverse order. Then
/// repeats disturbed rounds until every setting has enough quiet rounds, or until the repetitions
/// have taken the time `patience`.
async fn all_rounds(
    options: &EchoOptions,
    settings: &[EchoSetting],
    servers: &EchoServers,
) -> Result<Vec<Vec<RoundResult>>, MeasureError> {
    let mut rounds: Vec<Vec<RoundResult>> = vec![Vec::new(); settings.len()];
    let mut spent = Duration::ZERO;
    for pass in 0.. {
        let quiet = |index: usize| rounds[index].iter().filter(|round| round.is_quiet()).count();
        let is_short = |index: &usize| quiet(*index) < options.rounds as usize;
        let mut order: Vec<usize> = (0..settings.len()).filter(is_short).collect();
        let is_extra = pass >= options.rounds;
        if order.is_empty() || (is_extra && spent >= options.patience) {
            break;
        }
        eprintln!("round {}: {} settings, {:?} each", pass + 1, order.len(), options.seconds);
        if pass % 2 == 1 {
            order.reverse();
        }
        for index in order {
            let setting = &settings[index];
            let measured = servers.round(setting, options.seconds).await;
            rounds[index].push(measured.map_err(|error| format!("{setting}: {}", errors::chain(&*error)))?);
            spent += if is_extra { options.seconds } else { Duration::ZERO };
        }
    }
    Ok(rounds)
}

fn default_json() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("target").join("bench").join("echo.json")
}
