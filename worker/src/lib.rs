//! One model's process: boots as the supervisor orders, proves its answers, and then runs batches
//! until there is no more work.
//!
//! [`boot`] takes a worker through its phases; [`serve`] runs it afterwards. [`engine`] runs the
//! model, [`device`] says how long that takes and which SMs the worker was given. An engine may use
//! a real GPU, but no device uses an engine. [`probe`] reports what a process finds on a GPU.

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
