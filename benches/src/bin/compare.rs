//! The data path of two builds, side by side.

use std::process::ExitCode;

fn main() -> ExitCode {
    shadowslice_benches::compare()
}
