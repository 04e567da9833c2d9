//! The binary `shadowslice-compare`, which compares the data paths of two builds.

use std::process::ExitCode;

fn main() -> ExitCode {
    shadowslice_benches::compare()
}
