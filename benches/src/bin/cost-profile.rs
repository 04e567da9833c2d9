//! The cost of a request, counted.

use std::process::ExitCode;

fn main() -> ExitCode {
    shadowslice_benches::cost_profile()
}
