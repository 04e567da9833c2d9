//! The binary `shadowslice-cost-profile`, which counts the system calls and instructions of a
//! request.

use std::process::ExitCode;

fn main() -> ExitCode {
    shadowslice_benches::cost_profile()
}
