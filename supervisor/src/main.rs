//! `shadowslice`: see `shadowslice --help`.

mod cli;
mod serve;

use std::process::ExitCode;

/// Keeps what it frees for some seconds. The C library gives the memory of large tensors back to the kernel with every request, which
/// then has to clear new pages for the next one (docs/measurements.md, *Costs of a request*).
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    cli::run()
}
