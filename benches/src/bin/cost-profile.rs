//! Counts the costs of a request.

use std::process::ExitCode;

fn main() -> ExitCode {
    shadowslice_benches::cost_profile()
}
