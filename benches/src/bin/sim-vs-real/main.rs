//! The simulator beside the real thing: the same configuration and the very same arrivals, simulated by
//! `shadowslice-simulate` and sent to `shadowslice serve` on the emulated device. Writes a page.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a benchmark writes to its user's terminal")]

mod agreement;
mod arrivals;
mod cases;
mod host;
mod outcomes;
mod page;
mod real;
mod simulated;
#[cfg(test)]
mod tests;

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use shadowslice_benches::MeasureError;
use shadowslice_benches::machine::HostInfo;

use agreement::Agreement;
use arrivals::ReplayArrival;
use cases::{CASES, ReplayCase};
use outcomes::RunOutcome;
use real::ReplayResult;
use simulated::Simulator;

/// Holds `shadowslice-simulate` against `shadowslice serve` on the emulated device, and writes a page that says
/// how well they agree.
///
/// Each load is drawn once. It is simulated, and sent to a fresh supervisor once a round; the cases take turns, so that
/// noise of the machine falls on all of them alike.
#[derive(Debug, Parser)]
#[command(name = "shadowslice-sim-vs-real")]
pub(crate) struct Options {
    /// The mix of models, with its profiles in `profiles` beside it; it says nothing of a controller
    #[arg(long, default_value = "configs/sim-vs-real.yaml")]
    config: PathBuf,
    /// How long each load lasts, in seconds
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=600))]
    seconds: u32,
    /// How often each case is run for real
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// The part of the GPU that a load takes on average if each request costs as little as it can
    #[arg(long, default_value_t = 0.55)]
    utilisation: f64,
    /// Decides the arrivals
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Only the cases that have this text in their names, such as `step, adaptive`
    #[arg(long, default_value = "")]
    only: String,
    /// Where arrivals, configurations and figures are kept
    #[arg(long, default_value = "target/sim-vs-real")]
    keep: PathBuf,
    /// Where the page goes; without it the tables are only shown
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
struct ReplayedCase {
    case: ReplayCase,
    arrivals: Vec<ReplayArrival>,
    /// In each phase.
    simulated: Vec<RunOutcome>,
    rounds: Vec<ReplayResult>,
}

fn run(options: &Options) -> Result<(), MeasureError> {
    let simulator = Simulator::prepare(options)?;
    let mut trials = Vec::new();
    for case in CASES.into_iter().filter(|case| case.to_string().contains(&options.only)) {
        let (arrivals, simulated) = simulator.trial(case)?;
        trials.push(ReplayedCase { case, arrivals, simulated, rounds: Vec::new() });
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
async fn replay(
    options: &Options,
    simulator: &Simulator,
    trials: &mut [ReplayedCase],
) -> Result<(), MeasureError> {
    for number in 0..options.rounds {
        let mut order: Vec<usize> = (0..trials.len()).collect();
        if number % 2 == 1 {
            order.reverse();
        }
        for index in order {
            let ReplayedCase { case, arrivals, simulated, rounds } = &mut trials[index];
            let config = simulator.config(*case);
            let round = real::replay(&config, arrivals, &simulated[0]).await;
            let round = round.map_err(|failure| format!("{case}: {failure}"))?;
            eprintln!("round {}: {case}: {round}", number + 1);
            rounds.push(round);
        }
    }
    Ok(())
}

fn report(options: &Options, trials: &[ReplayedCase]) -> Result<(), MeasureError> {
    let agreements: Vec<Agreement> =
        trials.iter().map(|trial| Agreement::of(trial.case, &trial.simulated, &trial.rounds)).collect();
    let json = options.keep.join("sim-vs-real.json");
    fs::write(&json, serde_json::to_vec_pretty(&agreements)?)
        .map_err(|error| format!("cannot write {}: {error}", json.display()))?;
    println!("{}", page::tables(&agreements));
    println!("the same figures: {}", json.display());
    if let Some(path) = &options.page {
        let text = page::of(&agreements, options, &HostInfo::here());
        fs::write(path, text).map_err(|error| format!("cannot write {}: {error}", path.display()))?;
        println!("the page: {}", path.display());
    }
    Ok(())
}
