//! The cost of an echo request from end to end.

use std::process::ExitCode;

fn main() -> ExitCode {
    shadowslice_benches::echo()
}
