//! `shadowslice doctor` checks a host and gives advice. `gather` collects `HostFacts`, and `judge`
//! converts them into checks. `judge` does no I/O.

mod check;
mod facts;
mod gather;
mod judge;
mod requirements;

use std::path::PathBuf;

use check::{Checks, Level};
use requirements::Requirements;

use shadowslice_config as config;
use shadowslice_shared::errors;
use shadowslice_shared::exit::{self, fail};

/// The command-line options of `doctor`.
#[derive(Debug, clap::Args)]
pub struct DoctorOptions {
    /// The configuration whose needs count as faults [default: the needs of real GPUs].
    config: Option<PathBuf>,
    /// Print JSON, for scripts.
    #[arg(long)]
    json: bool,
    /// Measure on each GPU whether partitions inside processes are isolated. This starts an MPS
    /// daemon and keeps the GPU busy for a few seconds. Other programs on the GPU slow down
    /// during the measurement, and falsify the result.
    #[arg(long)]
    partitions: bool,
}

/// Returns the exit code.
pub fn run(options: &DoctorOptions) -> u8 {
    let config = match options.config.as_deref().map(config::load_here).transpose() {
        Ok(config) => config,
        Err(error) => return fail(&errors::chain(&error), exit::CONFIG),
    };
    let need = config.as_ref().map_or_else(Requirements::everything, Requirements::of);
    let mut facts = gather::facts(config.as_ref());
    if options.partitions {
        facts.partitions = Some(gather::partitions(&facts, need.gpus.as_deref()));
    }
    let report = Checks { checks: judge::judge(&facts, &need) };
    let text = if options.json { report.json() } else { report.lines() };
    let printed = exit::print(&format!("{text}\n"));
    if report.checks.iter().any(|check| check.level == Level::Fault) { exit::UNAVAILABLE } else { printed }
}

#[cfg(test)]
mod tests;
