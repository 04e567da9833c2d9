//! `shadowslice`: see `shadowslice --help`.

mod cli;
mod serve;

use std::process::ExitCode;

/// Keeps freed memory for some seconds. The C library gives the memory of large tensors back to the
/// kernel with each request, and the kernel then has to clear new pages for the next request
/// (docs/measurements.md, *Costs of a request*).
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    cli::run()
}
