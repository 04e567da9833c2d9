//! The types that shadowslice's supervisor and its workers share: units, tensors, the messages
//! between the two processes, their shared memory, and profiles.
//!
//! Nothing in this crate reads a clock, runs an async runtime or calls a GPU.
#![warn(missing_docs)]

pub mod batch;
pub mod boot;
pub mod contention;
pub mod errors;
pub mod exit;
pub mod frame;
pub mod groups;
pub mod ids;
pub mod pool;
pub mod profile;
pub mod rounding;
pub mod slab;
pub mod tensor;
pub mod units;
pub mod weights;
