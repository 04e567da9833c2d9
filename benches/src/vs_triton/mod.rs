//! The comparison of shadowslice with NVIDIA Triton on the same machine, with the same model, requests and
//! load generator, in alternating rounds. The program writes a page.

mod call;
mod case;
mod change;
mod comparisons;
mod many_models;
mod page;
mod python;
mod results;
mod servers;
mod shadowslice;
#[cfg(test)]
mod tests;
mod triton;

use std::path::PathBuf;
use std::time::Duration;

use shadowslice_shared::errors;

use crate::report::save_json;
use crate::{MeasureError, until_interrupted};

use case::ServerCase;
use comparisons::{COMPARISONS, Comparison};
use page::Versions;
use results::CaseResult;
use servers::ServerPair;

/// Compare `shadowslice serve` with NVIDIA Triton, and write a page that shows which targets are
/// met. With the default options this takes about ten minutes on two cores.
///
/// Both servers run all the time. The cases take turns, and every second round reverses their
/// order. Noise of the machine therefore affects both servers equally. Every byte of the answers is
/// compared.
#[derive(Debug, clap::Args)]
pub(crate) struct VsTritonOptions {
    /// The folder in which Triton is installed, with the models in `models`
    #[arg(long, default_value = "target/rivals")]
    rivals: PathBuf,
    /// The folder of the scripts that start Triton and its Python client
    #[arg(long, default_value = "benches/rivals")]
    scripts: PathBuf,
    /// The Python interpreter that runs the client
    #[arg(long, env = "PYTHON", default_value = "python3")]
    python: PathBuf,
    /// Run the models of shadowslice in Python, as Triton does
    #[arg(long)]
    python_models: bool,
    /// The length of a round of one case, in seconds
    #[arg(long, default_value = "2", value_parser = seconds)]
    seconds: Duration,
    /// The number of rounds of each case
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: u32,
    /// The length of each load of the comparison `more models than fit`, in seconds
    #[arg(long, default_value = "30", value_parser = load_seconds)]
    many_seconds: Duration,
    /// Run only comparisons whose names contain this text, for example `killed`
    #[arg(long, default_value = "")]
    only: String,
    /// The JSON file for the figures of all rounds
    #[arg(long, default_value = "target/rivals/vs-triton.json")]
    json: PathBuf,
    /// The file to write the page to. Without it, the program only prints the table
    #[arg(long)]
    page: Option<PathBuf>,
}

fn load_seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| (1..=3_600).contains(seconds));
    seconds.map(Duration::from_secs).ok_or_else(|| "give a whole number from 1 to 3600".into())
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.1..=60.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "give a number from 0.1 to 60".into())
}

/// A case and the results of its rounds.
pub(crate) struct CaseRounds {
    case: ServerCase,
    rounds: Vec<CaseResult>,
}

pub(crate) fn run(options: &VsTritonOptions) -> Result<(), MeasureError> {
    let rows: Vec<&Comparison> = COMPARISONS.iter().filter(|row| row.what.contains(&options.only)).collect();
    let runs_many_models = many_models::NAME.contains(&options.only);
    if rows.is_empty() && !runs_many_models {
        return Err(format!("no comparison matches --only {:?}", options.only).into());
    }
    let (trials, versions) = until_interrupted(measure(options, &rows))?;
    let compared: Vec<_> = rows.iter().map(|row| row.compare(&trials)).collect::<Result<_, _>>()?;
    let many = match runs_many_models {
        true => until_interrupted(many_models::measure(options))?,
        false => Vec::new(),
    };
    save_json(&options.json, &page::figures(options, &versions, &compared, &trials, &many))?;
    page::report(options, &versions, &compared, &trials, &many).publish(options.page.as_deref())
}

async fn measure(
    options: &VsTritonOptions,
    rows: &[&Comparison],
) -> Result<(Vec<CaseRounds>, Versions), MeasureError> {
    let mut trials: Vec<CaseRounds> = Vec::new();
    for case in rows.iter().flat_map(|row| [row.ours, row.triton]) {
        if trials.iter().all(|trial| trial.case != case) {
            trials.push(CaseRounds { case, rounds: Vec::new() });
        }
    }
    let mut servers = ServerPair::start(options).await?;
    for number in 0..options.rounds {
        let mut order: Vec<usize> = (0..trials.len()).collect();
        if number % 2 == 1 {
            order.reverse();
        }
        for index in order {
            let CaseRounds { case, rounds } = &mut trials[index];
            let measured = servers.measure(case, options.seconds).await;
            let measured = measured.map_err(|failure| format!("{case}: {}", errors::chain(&*failure)))?;
            eprintln!("round {}: {case}: {measured}", number + 1);
            rounds.push(measured);
        }
    }
    let versions = servers.versions();
    servers.stop().await?;
    Ok((trials, versions))
}
