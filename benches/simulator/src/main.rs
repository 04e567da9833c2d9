//! The binary `shadowslice-simulate`, which simulates policies. See `shadowslice-simulate --help`.

mod command;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    ExitCode::from(command::run(&command::SimulateOptions::parse()))
}
