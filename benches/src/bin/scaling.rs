//! The binary `shadowslice-scaling`, which measures how costs scale with the load.

use std::process::ExitCode;

fn main() -> ExitCode {
    shadowslice_benches::scaling()
}
