//! This server beside NVIDIA Triton, on the same machine: the same model, the same requests, the
//! same load generator, in alternating rounds. Writes a page.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a benchmark writes to its user's terminal")]

mod call;
mod case;
mod change;
mod measured;
mod ours;
mod page;
mod python;
mod rows;
mod servers;
#[cfg(test)]
mod tests;
mod triton;

use std::error::Error;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use shadowslice_benches::Failure;
use shadowslice_benches::machine::Machine;
use tokio::signal::unix::{SignalKind, signal};

use case::Case;
use measured::Measured;
use page::Versions;
use rows::{ROWS, Row};
use servers::Servers;

/// Compares `shadowslice serve` with NVIDIA Triton, and writes a page with the goals and whether
/// they are met.
///
/// Both servers run all the time. The cases take turns, in reverse order in every other round, so
/// that noise of the machine affects both alike. The bytes of every answer are compared.
#[derive(Debug, Parser)]
#[command(name = "shadowslice-versus")]
pub(crate) struct Options {
    /// The folder in which Triton is installed, with the models in `models`
    #[arg(long, default_value = "target/rivals")]
    rivals: PathBuf,
    /// The folder of the scripts that start Triton and its Python client
    #[arg(long, default_value = "benches/rivals")]
    scripts: PathBuf,
    /// The Python interpreter for the client
    #[arg(long, env = "PYTHON", default_value = "python3")]
    python: PathBuf,
    /// Run the models of this server in Python, as Triton does
    #[arg(long)]
    python_models: bool,
    /// The length of a round of a case, in seconds
    #[arg(long, default_value = "2", value_parser = seconds)]
    seconds: Duration,
    /// The rounds of each case
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// Measure only the rows whose names contain this text, such as `killed`
    #[arg(long, default_value = "")]
    only: String,
    /// The file for the figures of all rounds, as JSON
    #[arg(long, default_value = "target/rivals/versus.json")]
    json: PathBuf,
    /// The file for the page [default: only print the tables]
    #[arg(long)]
    page: Option<PathBuf>,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.1..=60.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "expected a number from 0.1 to 60".into())
}

/// A case and the results of its rounds.
pub(crate) struct Trial {
    case: Case,
    rounds: Vec<Measured>,
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("error: {}", chain(&*failure));
            ExitCode::FAILURE
        }
    }
}

fn chain(error: &(dyn Error + 'static)) -> String {
    let causes = std::iter::successors(error.source(), |&cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

/// All load is sent by one thread.
fn run(options: &Options) -> Result<(), Failure> {
    let rows: Vec<&Row> = ROWS.iter().filter(|row| row.what.contains(&options.only)).collect();
    if rows.is_empty() {
        return Err(format!("no row's name holds {:?}", options.only).into());
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (trials, versions) = runtime.block_on(async {
        // The servers' owner stops them here; a signal alone would leave them behind.
        tokio::select! {
            measured = measure(options, &rows) => measured,
            _ = interrupted() => Err("interrupted".into()),
        }
    })?;
    report(options, &rows, &trials, &versions)
}

async fn interrupted() -> std::io::Result<()> {
    let mut terminated = signal(SignalKind::terminate())?;
    tokio::select! {
        pressed = tokio::signal::ctrl_c() => pressed,
        _ = terminated.recv() => Ok(()),
    }
}

async fn measure(options: &Options, rows: &[&Row]) -> Result<(Vec<Trial>, Versions), Failure> {
    let mut trials: Vec<Trial> = Vec::new();
    for case in rows.iter().flat_map(|row| [row.ours, row.triton]) {
        if trials.iter().all(|trial| trial.case != case) {
            trials.push(Trial { case, rounds: Vec::new() });
        }
    }
    let mut servers = Servers::start(options).await?;
    for number in 0..options.rounds {
        let mut order: Vec<usize> = (0..trials.len()).collect();
        if number % 2 == 1 {
            order.reverse();
        }
        for index in order {
            let Trial { case, rounds } = &mut trials[index];
            let measured = servers.measure(case, options.seconds).await;
            let measured = measured.map_err(|failure| format!("{case}: {}", chain(&*failure)))?;
            eprintln!("round {}: {case}: {measured}", number + 1);
            rounds.push(measured);
        }
    }
    let versions = servers.versions();
    servers.stop().await?;
    Ok((trials, versions))
}

fn report(options: &Options, rows: &[&Row], trials: &[Trial], versions: &Versions) -> Result<(), Failure> {
    let machine = Machine::here();
    let compared: Vec<_> = rows.iter().map(|row| row.compare(trials)).collect::<Result<_, _>>()?;
    println!("{}", page::table(&compared));
    write(&options.json, &page::json(options, &machine, versions, &compared, trials)?)?;
    println!("all rounds: {}", options.json.display());
    if let Some(path) = &options.page {
        write(path, &page::of(options, &machine, versions, &compared, trials))?;
        println!("the page: {}", path.display());
    }
    Ok(())
}

fn write(path: &PathBuf, text: &str) -> Result<(), Failure> {
    fs::write(path, text).map_err(|error| format!("cannot write {}: {error}", path.display()).into())
}
