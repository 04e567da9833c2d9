//! The binary `shadowslice-bench`, which has a subcommand for each benchmark that writes a page.

use std::process::ExitCode;

fn main() -> ExitCode {
    shadowslice_benches::bench()
}
