//! The worker, which is one process for one model, or a [thread](shared) of a process for several. A
//! worker boots on the supervisor's orders, passes the proof of its answers, and then runs batches until
//! the supervisor closes the worker's socket.
//!
//! [`device`] determines how long batches take and which SMs the worker has. The code of an engine
//! may depend on the code of a real GPU, but no device depends on an engine.

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
pub mod shared;

/// Writes one line to stderr, which the supervisor logs. In a shared worker, the line begins with the
/// name of the model, which is that of the thread.
pub fn log_line(line: &str) {
    let thread = std::thread::current();
    let model =
        thread.name().filter(|name| *name != "main").map_or(String::new(), |name| format!("{name}: "));
    // The error is ignored, because the worker does not need its log lines.
    writeln!(std::io::stderr(), "{model}{line}").ok();
}
