//! The evaluation of the adaptive policy: simulations on random mixes of models, with baselines, every
//! fixed layout and a fluid bound for comparison. The program writes a page that says which targets the
//! policy meets.
#![expect(clippy::print_stderr, reason = "a benchmark writes to its user's terminal")]

mod compare;
mod evidence;
mod mixes;
mod page;
mod profiles;
mod simulate;
#[cfg(test)]
mod tests;

use std::error::Error;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;

use evidence::Evidence;
use page::Section;
use simulate::{Mechanism, Setup};

/// A failure that ends the program.
type Failure = Box<dyn Error + Send + Sync>;

/// Evaluates the adaptive policy in simulations, and writes a page that says which targets it meets.
/// On two cores this takes about six minutes.
#[derive(Debug, Parser)]
#[command(name = "shadowslice-policy-eval")]
struct Options {
    #[command(flatten)]
    setup: Setup,
    /// The file to which the page is written
    #[arg(long, default_value = "docs/development/policy-evaluation.md")]
    page: PathBuf,
    /// The date and the state of the code, as the page shows them
    #[arg(long, default_value = "an unknown state of the code")]
    state: String,
}

fn main() -> ExitCode {
    let options = Options::parse();
    match evaluate(&options) {
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

fn evaluate(options: &Options) -> Result<(), Failure> {
    let setup = &options.setup;
    let (mixes, sevens) = (setup.mixes(setup.mixes)?, setup.sevens()?);
    let shadows = setup.mixes(setup.shadows)?;
    let section = |title, mixes: &[_], mechanism, name| -> Result<Section, Failure> {
        let trials = setup.trials(mixes, mechanism, name)?;
        Ok(Section { title, name, evidence: Evidence::of(trials) })
    };
    let sections = [
        section("Seven models", &sevens, Mechanism::InProcess, "seven")?,
        section("Mixes", &mixes, Mechanism::InProcess, "mix")?,
        section("Mixes, shares changed by shadows", &shadows, Mechanism::Shadow, "shadow")?,
    ];
    let rest = [setup.rest(&sevens, "seven")?, setup.rest(&mixes, "mix")?].concat();
    let text = page::of(&sections, &rest, setup, &options.state);
    let path = options.page.display();
    fs::write(&options.page, text).map_err(|error| format!("cannot write {path}: {error}"))?;
    eprintln!("wrote {path}");
    Ok(())
}
