//! The comparison of `shadowslice-simulate` with `shadowslice serve` on the emulated device. Both get the
//! same configuration and the same arrivals. The program writes a page.

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

use std::path::PathBuf;

use crate::plan::matching;
use crate::report::save_json;
use crate::{MeasureError, until_interrupted};

use agreement::Agreement;
use arrivals::ReplayArrival;
use cases::{CASES, ReplayCase};
use outcomes::RunOutcome;
use real::ReplayResult;
use simulated::Simulator;

/// Compare `shadowslice-simulate` with `shadowslice serve` on the emulated device, and write a page
/// that shows how well they agree. With the default options this takes about five minutes on two
/// cores.
///
/// Each load is drawn once, simulated, and sent to a new supervisor in each round. The cases take
/// turns, so that noise of the machine affects all cases equally.
#[derive(Debug, clap::Args)]
pub(crate) struct SimVsRealOptions {
    /// The configuration of the models, without a controller. Its profiles are in the folder `profiles` next
    /// to it
    #[arg(long, default_value = "configs/sim-vs-real.yaml")]
    config: PathBuf,
    /// The duration of each load, in seconds
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=600))]
    seconds: u32,
    /// The number of real runs of each case
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// The mean fraction of the GPU that a load uses if each request has its minimum cost
    #[arg(long, default_value_t = 0.55)]
    utilisation: f64,
    /// The seed of the arrivals
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Run only cases whose names contain this text, for example `step, adaptive`
    #[arg(long, default_value = "")]
    only: String,
    /// The folder for arrivals, configurations and figures
    #[arg(long, default_value = "target/sim-vs-real")]
    keep: PathBuf,
    /// The file to write the page to. Without it, the program only prints the tables
    #[arg(long)]
    page: Option<PathBuf>,
}

/// A case with its arrivals and its results so far.
struct ReplayedCase {
    case: ReplayCase,
    arrivals: Vec<ReplayArrival>,
    /// The simulated outcomes, one for each phase.
    simulated: Vec<RunOutcome>,
    rounds: Vec<ReplayResult>,
}

pub(crate) fn run(options: &SimVsRealOptions) -> Result<(), MeasureError> {
    let simulator = Simulator::prepare(options)?;
    let mut trials = Vec::new();
    for case in matching(CASES, &options.only)? {
        let (arrivals, simulated) = simulator.trial(case)?;
        trials.push(ReplayedCase { case, arrivals, simulated, rounds: Vec::new() });
    }
    until_interrupted(replay(options, &simulator, &mut trials))?;
    let agreements: Vec<Agreement> =
        trials.iter().map(|trial| Agreement::of(trial.case, &trial.simulated, &trial.rounds)).collect();
    save_json(&options.keep.join("sim-vs-real.json"), &agreements)?;
    page::report(&agreements, options).publish(options.page.as_deref())
}

/// Runs all rounds. Every second round runs the cases in the reverse order.
async fn replay(
    options: &SimVsRealOptions,
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
