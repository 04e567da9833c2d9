//! How soon a model has more SMs when more comes: from a step in demand, on the client's clock, to the first batch at a larger share.

mod case;
mod load;
mod orders;
mod page;
mod round;
mod run;
#[cfg(test)]
mod tests;

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;

use crate::step::case::CASES;
use crate::step::round::Trial;
use crate::{Failure, finish};

/// Lets loads step up under the policy `adaptive` on emulated GPUs, and writes a page that says how soon their models had more.
#[derive(Debug, Parser)]
#[command(name = "shadowslice-step")]
struct Options {
    /// Steps of each case
    #[arg(long, default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..=16))]
    rounds: u32,
    /// Decides the arrivals
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Only the cases whose names hold this text, such as `1200/s, standby auto`
    #[arg(long, default_value = "")]
    only: String,
    /// Where the page goes; without it the tables are only shown
    #[arg(long)]
    page: Option<PathBuf>,
}

/// The whole program, as its command line says.
pub fn step() -> ExitCode {
    let options = Options::parse();
    finish(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            // The supervisor stops with what owns it here; a signal alone would leave it behind.
            tokio::select! {
                measured = measure(&options) => measured,
                _ = tokio::signal::ctrl_c() => Err("interrupted".into()),
            }
        })
    })
}

async fn measure(options: &Options) -> Result<(), Failure> {
    let mut trials = Vec::new();
    for case in CASES.into_iter().filter(|case| case.to_string().contains(&options.only)) {
        let rounds = run::run(&case, options.rounds, options.seed).await;
        trials.push(Trial { case, rounds: rounds.map_err(|failure| format!("{case}: {failure}"))? });
    }
    if trials.is_empty() {
        return Err(format!("no case's name holds {:?}", options.only).into());
    }
    println!("{}", page::tables(&trials));
    if let Some(path) = &options.page {
        fs::write(path, page::of(&trials, options.rounds, options.seed))
            .map_err(|error| format!("cannot write {}: {error}", path.display()))?;
        println!("the page: {}", path.display());
    }
    Ok(())
}
