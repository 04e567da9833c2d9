//! The types that shadowslice's supervisor and its workers share: units, tensors, models' files,
//! profiles, shared memory, and the messages between the two processes.
//!
//! This crate reads no clock, runs no async code and calls no GPU.
#![warn(missing_docs)]

pub mod batch;
pub mod boot;
pub mod compare;
pub mod contention;
pub mod errors;
pub mod exit;
pub mod frame;
pub mod groups;
pub mod ids;
pub mod members;
pub mod model_cache;
pub mod onnx;
pub mod passing;
pub mod pause;
pub mod pool;
pub mod profile;
pub mod rounding;
pub mod slab;
pub mod tensor;
pub mod units;
pub mod weights;
