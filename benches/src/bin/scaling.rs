//! Whether a cost grows faster than the load.

use std::process::ExitCode;

fn main() -> ExitCode {
    shadowslice_benches::scaling()
}
