//! What an echo request costs from end to end.

use std::process::ExitCode;

fn main() -> ExitCode {
    shadowslice_benches::echo()
}
