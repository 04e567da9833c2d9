//! A benchmark that sends echo requests through the complete system.

use std::process::ExitCode;

fn main() -> ExitCode {
    shadowslice_benches::echo()
}
