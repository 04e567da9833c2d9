//! The binary `shadowslice-simulate`, which simulates policies. `shadowslice-simulate --help`
//! explains its options.

mod command;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    ExitCode::from(command::run(&command::SimulateOptions::parse()))
}
