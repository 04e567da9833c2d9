//! The judgement of the adaptive policy: simulated against the ideal and all baselines, over all loads and
//! seeds that nobody tuned anything on, and held against what was promised. Writes a page.
#![expect(clippy::print_stderr, reason = "a benchmark talks to whoever runs it")]

mod criteria;
mod evidence;
mod judgement;
mod mixes;
mod page;
mod profiles;
mod simulate;
mod statistics;
#[cfg(test)]
mod tests;

use std::error::Error;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;

use evidence::Evidence;
use judgement::Judgement;
use simulate::{Setup, World};

/// What ends the program.
type Failure = Box<dyn Error + Send + Sync>;

/// Judges the adaptive policy in simulations, and writes a page that says which criterion is met.
///
/// One process on one core does it, in about twenty minutes.
#[derive(Debug, Parser)]
#[command(name = "shadowslice-judge")]
struct Options {
    #[command(flatten)]
    setup: Setup,
    /// Where the page goes
    #[arg(long, default_value = "docs/judgement.md")]
    page: PathBuf,
    /// When it was judged, and the state of the code, as the page shall say it
    #[arg(long, default_value = "an unknown state of the code")]
    state: String,
}

fn main() -> ExitCode {
    let options = Options::parse();
    match judge(&options) {
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

fn judge(options: &Options) -> Result<(), Failure> {
    let evidence = |world: World| -> Result<Evidence, Failure> {
        Ok(Evidence::new(options.setup.runs_in(world)?, world.loads(), &world.policies())?)
    };
    let judgement = Judgement::of(
        &evidence(World::Profiled)?,
        &evidence(World::Steady)?,
        &evidence(World::Told)?,
        &evidence(World::Misled)?,
    );
    let text = page::of(&judgement, &options.setup, &options.state);
    let path = options.page.display();
    fs::write(&options.page, text).map_err(|error| format!("cannot write {path}: {error}"))?;
    eprintln!("the judgement: {path}");
    Ok(())
}
