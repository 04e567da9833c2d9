//! The evaluation of the adaptive policy in simulations of random mixes of models. The program compares the
//! policy with baselines, all fixed layouts and a fluid bound, and writes a page that shows which targets
//! the policy meets.

mod compare;
mod evidence;
mod mixes;
mod page;
mod profiles;
mod simulate;
#[cfg(test)]
mod tests;

use std::path::PathBuf;

use crate::MeasureError;
use crate::report::save;

use evidence::Evidence;
use page::PageSection;
use simulate::{Setup, ShareMechanism};

/// Evaluate the adaptive policy in simulations, and write a page that shows which targets it meets. With the
/// default options this takes about six minutes on two cores.
#[derive(Debug, clap::Args)]
pub(crate) struct EvaluationOptions {
    #[command(flatten)]
    setup: Setup,
    /// The file to which the page is written
    #[arg(long, default_value = "docs/development/policy-evaluation.md")]
    page: PathBuf,
    /// The date and the state of the code, as the page shows them
    #[arg(long, default_value = "an unknown state of the code")]
    state: String,
}

pub(crate) fn run(options: &EvaluationOptions) -> Result<(), MeasureError> {
    let setup = &options.setup;
    let (mixes, sevens) = (setup.mixes(setup.mixes)?, setup.sevens()?);
    let shadows = setup.mixes(setup.shadows)?;
    let section = |title, mixes: &[_], mechanism, name| -> Result<PageSection, MeasureError> {
        let trials = setup.trials(mixes, mechanism, name)?;
        Ok(PageSection { title, name, evidence: Evidence::of(trials) })
    };
    let sections = [
        section("Seven models", &sevens, ShareMechanism::InProcess, "seven")?,
        section("Mixes", &mixes, ShareMechanism::InProcess, "mix")?,
        section("Mixes, shares changed by shadows", &shadows, ShareMechanism::Shadow, "shadow")?,
    ];
    let rest = [setup.rest(&sevens, "seven")?, setup.rest(&mixes, "mix")?].concat();
    let text = page::of(&sections, &rest, setup, &options.state);
    save(&options.page, text)
}
