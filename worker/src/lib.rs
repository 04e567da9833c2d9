//! One model's process: boots as the supervisor orders, proves its answers, and then runs batches
//! until there is no more work.
//!
//! [`device`] says how long batches take and which SMs the worker was given. An engine may use a
//! real GPU, but no device uses an engine.

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

/// Writes one line for the supervisor to log.
pub fn say(line: &str) {
    let _nobody_reads = writeln!(std::io::stderr(), "{line}");
}
