//! The worker, which is one process for one model. A worker boots on the supervisor's orders,
//! proves its answers, and then runs batches until the supervisor closes its socket.
//!
//! [`device`] determines how long batches take and which SMs the worker has. The code of an engine
//! may depend on that of a real GPU, but no device depends on an engine.

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
    // If no process reads the line, the worker continues without it.
    writeln!(std::io::stderr(), "{line}").ok();
}
