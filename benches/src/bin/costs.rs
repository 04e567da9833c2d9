//! What a request costs, counted.

use std::process::ExitCode;

fn main() -> ExitCode {
    shadowslice_benches::costs()
}
