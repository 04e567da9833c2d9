//! One model's process: boots as the supervisor orders, proves its answers, and then runs batches
//! until there is no more work.
//!
//! [`boot`] takes a worker through its phases; [`serve`] is its life afterwards. [`engine`] runs the
//! model, [`device`] says how long that takes and what it was given to run on. An engine may know a real GPU, and no
//! device an engine. [`probe`] tells others what a process finds on a GPU.

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
