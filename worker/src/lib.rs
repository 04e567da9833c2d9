//! One model's process: boots as the supervisor orders, proves its answers, and then runs batches
//! until there is no more work.
//!
//! [`device`] says how long batches take and which SMs the worker was given. An engine may use a
//! real GPU, but no device uses an engine.

pub mod answer;
pub mod boot;
mod clock;
pub mod descriptors;
pub mod device;
pub mod engine;
pub mod inputs;
pub mod probe;
pub mod proof;
pub mod serve;
