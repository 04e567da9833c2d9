//! `shadowslice`: see `shadowslice --help`.

use std::process::ExitCode;

fn main() -> ExitCode {
    shadowslice::cli::run()
}
