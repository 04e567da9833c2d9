//! `shadowslice`: see `shadowslice --help`.

mod check_run;
mod cli;
mod cost;
mod ground;
mod init;
mod lifecycle;
mod listeners;
mod manual;
mod place;
mod rollout;
mod running;
mod serve;
mod serving;
mod shown;
mod systemd;
mod tasks;
mod telemetry;
mod temporary;

use std::process::ExitCode;

/// Keeps freed memory for some seconds: the C library gives the memory of large tensors back with
/// each request, and the kernel has to clear new pages for the next one (docs/development/measurements.md,
/// *Costs of a request*).
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    cli::run()
}
