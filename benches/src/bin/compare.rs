//! Compares the data paths of two builds.

use std::process::ExitCode;

fn main() -> ExitCode {
    shadowslice_benches::compare()
}
