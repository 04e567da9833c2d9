//! Whether anything grows faster than what is asked of it.

use std::process::ExitCode;

fn main() -> ExitCode {
    shadowslice_benches::growth()
}
