//! The worker: one process for one model. A worker boots as the supervisor orders, proves its
//! answers, and then runs batches until the supervisor closes its socket.
//!
//! [`device`] tells how long batches take and which SMs the worker has. An engine may use a real
//! GPU, but no device uses an engine.

use std::io::Write;

pub mod answer;
pub mod boot;
mod clock;
pub mod descriptors;
pub mod device;
pub mod engine;
pub mod inputs;
mod parent;
pub mod probe;
pub mod proof;
pub mod sandbox;
pub mod serve;

/// Writes one line to stderr, which the supervisor logs.
pub fn log_line(line: &str) {
    // A line that nobody can read any more is not worth a failure.
    writeln!(std::io::stderr(), "{line}").ok();
}
