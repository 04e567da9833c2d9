//! The simulator beside the real thing: the same configuration and the very same arrivals, simulated by
//! `shadowslice-simulate` and sent to `shadowslice serve` on the emulated device. Writes a page.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a benchmark writes to its user's terminal")]

mod agreement;
mod arrivals;
mod cases;
mod figures;
mod host;
mod page;
mod real;
mod simulated;
#[cfg(test)]
mod tests;

use std::error::Error;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use shadowslice_benches::machine::Machine;

use agreement::Agreement;
use arrivals::Arrival;
use cases::{CASES, Case};
use figures::Figures;
use real::Round;
use simulated::Simulator;

/// A failure that ends the program.
type Failure = Box<dyn Error + Send + Sync>;

/// Compares `shadowslice-simulate` with `shadowslice serve` on the emulated device, and writes a
/// page that shows how well they agree.
///
/// Each load is drawn once. It is simulated, and sent to a fresh supervisor once in each round. The
/// cases take turns, so that noise of the machine affects all of them alike.
#[derive(Debug, Parser)]
#[command(name = "shadowslice-beside")]
pub(crate) struct Options {
    /// The configuration with the mix of models, without `controller`; its profiles are in
    /// `profiles` beside it
    #[arg(long, default_value = "configs/beside.yaml")]
    config: PathBuf,
    /// The length of each load, in seconds
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=600))]
    seconds: u32,
    /// The number of real runs of each case
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// The part of the GPU that a load uses on average, if each request costs as little as possible
    #[arg(long, default_value_t = 0.55)]
    utilisation: f64,
    /// The seed of the arrivals
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Run only the cases whose names contain this text, such as `step, adaptive`
    #[arg(long, default_value = "")]
    only: String,
    /// The folder for arrivals, configurations and figures
    #[arg(long, default_value = "target/beside")]
    keep: PathBuf,
    /// The file for the page [default: only print the tables]
    #[arg(long)]
    page: Option<PathBuf>,
}

fn main() -> ExitCode {
    let options = Options::parse();
    match run(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            let causes = std::iter::successors(failure.source(), |&cause| cause.source());
            eprintln!(
                "error: {}",
                causes.fold(failure.to_string(), |text, cause| format!("{text}: {cause}"))
            );
            ExitCode::FAILURE
        }
    }
}

/// A case with its inputs.
struct Trial {
    case: Case,
    arrivals: Vec<Arrival>,
    /// In each phase.
    simulated: Vec<Figures>,
    rounds: Vec<Round>,
}

fn run(options: &Options) -> Result<(), Failure> {
    let simulator = Simulator::prepare(options)?;
    let mut trials = Vec::new();
    for case in CASES.into_iter().filter(|case| case.to_string().contains(&options.only)) {
        let (arrivals, simulated) = simulator.trial(case)?;
        trials.push(Trial { case, arrivals, simulated, rounds: Vec::new() });
    }
    if trials.is_empty() {
        return Err(format!("no case's name holds {:?}", options.only).into());
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        // The supervisor's owner stops it here; a signal alone would leave it behind.
        tokio::select! {
            replayed = replay(options, &simulator, &mut trials) => replayed,
            _ = tokio::signal::ctrl_c() => Err("interrupted".into()),
        }
    })?;
    report(options, &trials)
}

/// All rounds; every other time the cases come in reverse.
async fn replay(options: &Options, simulator: &Simulator, trials: &mut [Trial]) -> Result<(), Failure> {
    for number in 0..options.rounds {
        let mut order: Vec<usize> = (0..trials.len()).collect();
        if number % 2 == 1 {
            order.reverse();
        }
        for index in order {
            let Trial { case, arrivals, simulated, rounds } = &mut trials[index];
            let config = simulator.config(*case);
            let round = real::replay(&config, arrivals, &simulated[0]).await;
            let round = round.map_err(|failure| format!("{case}: {failure}"))?;
            eprintln!("round {}: {case}: {round}", number + 1);
            rounds.push(round);
        }
    }
    Ok(())
}

fn report(options: &Options, trials: &[Trial]) -> Result<(), Failure> {
    let agreements: Vec<Agreement> =
        trials.iter().map(|trial| Agreement::of(trial.case, &trial.simulated, &trial.rounds)).collect();
    let json = options.keep.join("beside.json");
    fs::write(&json, serde_json::to_vec_pretty(&agreements)?)
        .map_err(|error| format!("cannot write {}: {error}", json.display()))?;
    println!("{}", page::tables(&agreements));
    println!("the same figures: {}", json.display());
    if let Some(path) = &options.page {
        let text = page::of(&agreements, options, &Machine::here());
        fs::write(path, text).map_err(|error| format!("cannot write {}: {error}", path.display()))?;
        println!("the page: {}", path.display());
    }
    Ok(())
}
