//! The cost of one echo request from end to end: requests per second, latency and CPU time, over
//! each protocol at several numbers of connections, beside a bare server that does nothing else.
//! [`compare`] measures two builds in turn, [`costs`] counts a request's system calls and
//! instructions, [`growth`] looks for cliffs as models, connections and tensors grow.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a benchmark writes to its user's terminal")]

mod bare;
pub mod closed_loop;
mod compare;
mod costs;
pub mod exchange;
mod growth;
pub mod grpc;
pub mod http;
pub mod machine;
mod plan;
mod report;
mod servers;
pub mod spread;
mod system;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};

use crate::closed_loop::Round;
use crate::machine::Machine;
use crate::plan::Setting;
use crate::report::Report;
use crate::servers::Servers;

pub use crate::compare::compare;
pub use crate::costs::costs;
pub use crate::growth::growth;

/// A failure that ends the program.
pub type Failure = Box<dyn Error + Send + Sync>;

/// Measures an echo request through the whole system: requests per second, latency, and CPU time per
/// request, for both protocols and several numbers of connections.
///
/// Every connection sends a request, waits for its answer, compares each byte of it, and sends the
/// next one (a closed loop). The settings take turns, so that noise of the machine affects all of
/// them alike. The table shows the median and the range of the rounds. If there are rounds in which
/// other programs used less than a tenth of the machine, it shows only these. A bare HTTP and a
/// bare gRPC server, which only echo, are measured in the same rounds for comparison.
///
/// CPU times are user and system times, as the kernel accounts them to the processes. The load
/// comes from this process, on one thread. Its CPU time is shown as well, because it takes cores
/// from the server.
#[derive(Debug, Parser)]
#[command(name = "cargo bench --bench echo --", args_conflicts_with_subcommands = true)]
struct Arguments {
    #[command(flatten)]
    options: Options,
    #[command(subcommand)]
    part: Option<Part>,
}

/// How long a setting runs where `cargo test` runs the benchmarks to see that they work.
const GLIMPSE: Duration = Duration::from_millis(50);

/// How long and how wide to measure.
#[derive(Debug, Clone, clap::Args)]
struct Options {
    /// The length of a round of a setting, in seconds
    #[arg(long, env = "SHADOWSLICE_BENCH_SECONDS", default_value = "1", value_parser = seconds)]
    seconds: Duration,
    /// The rounds of every setting
    #[arg(long, env = "SHADOWSLICE_BENCH_ROUNDS", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// The total time for further rounds if other programs used more than a tenth of the machine,
    /// in seconds
    #[arg(long, env = "SHADOWSLICE_BENCH_PATIENCE", default_value = "60", value_parser = patience)]
    patience: Duration,
    /// The numbers of connections
    #[arg(long, env = "SHADOWSLICE_BENCH_CONNECTIONS", default_value = "1,8,32,128", value_name = "N", value_delimiter = ',',
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    connections: Vec<u16>,
    /// Measure only the settings whose names contain this text, such as `grpc unix 64 B`
    #[arg(long, env = "SHADOWSLICE_BENCH_ONLY", default_value = "")]
    only: String,
    /// The file for the figures, as JSON [default: target/bench/echo.json]
    #[arg(long, env = "SHADOWSLICE_BENCH_JSON")]
    json: Option<PathBuf>,
    /// Measure; `cargo bench` sets this. Without this flag, every setting only runs briefly as a test
    #[arg(long)]
    bench: bool,
}

/// The roles that this program starts itself in.
#[derive(Debug, Subcommand)]
enum Part {
    /// Serve bare echoes on sockets in a folder until standard input ends
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
    seconds.map(Duration::from_secs_f64).ok_or_else(|| format!("expected a number from {least} to {most}"))
}

/// The whole benchmark, as its command line says.
pub fn echo() -> ExitCode {
    let Arguments { mut options, part } = Arguments::parse();
    if !options.bench {
        (options.seconds, options.rounds, options.patience) = (GLIMPSE, 1, Duration::ZERO);
    }
    finish(|| match part {
        Some(Part::Bare { folder }) => bare::run(&folder).map_err(Failure::from),
        None => run(&options),
    })
}

/// Runs a program, and reports its failure.
fn finish(program: impl FnOnce() -> Result<(), Failure>) -> ExitCode {
    match program() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", chain(&*error));
            ExitCode::FAILURE
        }
    }
}

fn chain(error: &(dyn Error + 'static)) -> String {
    let causes = std::iter::successors(error.source(), |&cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

/// A table in Markdown.
pub fn table(heads: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let heads: Vec<String> = heads.iter().map(|&head| head.to_owned()).collect();
    let rule = vec!["---".to_owned(); heads.len()];
    let body: String = rows.map(|cells| line(&cells)).collect();
    line(&heads) + &line(&rule) + &body
}

/// All load is sent by one thread.
fn run(options: &Options) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        // The servers' owner stops them here; a signal alone would leave them behind.
        tokio::select! {
            measured = measure(options) => measured,
            _ = tokio::signal::ctrl_c() => Err("interrupted".into()),
        }
    })
}

async fn measure(options: &Options) -> Result<(), Failure> {
    let settings: Vec<Setting> = plan::settings(&options.connections)
        .into_iter()
        .filter(|setting| setting.to_string().contains(&options.only))
        .collect();
    if settings.is_empty() {
        return Err(format!("no setting's name holds {:?}", options.only).into());
    }
    let machine = Machine::here();
    let servers = Servers::start(&settings).await?;
    let rounds = all_rounds(options, &settings, &servers).await?;
    servers.stop().await?;
    let report = Report::new(machine, options, settings, rounds);
    println!("{report}");
    if let Some(path) = options.json.clone().or_else(|| options.bench.then(default_json)) {
        report.write(&path)?;
        println!("the same figures, round by round: {}", path.display());
    }
    Ok(())
}

/// The rounds of each setting. Every other time the settings come in reverse. At the end, settings
/// with disturbed rounds have further rounds, while there is patience.
async fn all_rounds(
    options: &Options,
    settings: &[Setting],
    servers: &Servers,
) -> Result<Vec<Vec<Round>>, Failure> {
    let mut rounds: Vec<Vec<Round>> = vec![Vec::new(); settings.len()];
    let mut spent = Duration::ZERO;
    for pass in 0.. {
        let quiet = |index: usize| rounds[index].iter().filter(|round| round.is_quiet()).count();
        let wanting = |index: &usize| quiet(*index) < options.rounds as usize;
        let mut order: Vec<usize> = (0..settings.len()).filter(wanting).collect();
        let further = pass >= options.rounds;
        if order.is_empty() || (further && spent >= options.patience) {
            break;
        }
        eprintln!("round {}: {} settings, {:?} each", pass + 1, order.len(), options.seconds);
        if pass % 2 == 1 {
            order.reverse();
        }
        for index in order {
            let setting = &settings[index];
            let measured = servers.round(setting, options.seconds).await;
            rounds[index].push(measured.map_err(|error| format!("{setting}: {}", chain(&*error)))?);
            spent += if further { options.seconds } else { Duration::ZERO };
        }
    }
    Ok(rounds)
}

fn default_json() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).with_file_name("target").join("bench").join("echo.json")
}
