//! How soon a model has more SMs when more comes.

use std::process::ExitCode;

fn main() -> ExitCode {
    shadowslice_benches::step()
}
