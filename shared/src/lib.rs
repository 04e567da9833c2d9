//! What shadowslice's supervisor and its workers must agree on: units, tensors, the wire between
//! the two processes, the memory they share, and the profile format.
//!
//! Nothing here reads a clock, runs a reactor or knows a GPU.

pub mod batch;
pub mod boot;
pub mod contention;
pub mod errors;
pub mod exit;
pub mod frame;
pub mod groups;
pub mod ids;
pub mod logged;
pub mod pool;
pub mod profile;
pub mod slab;
pub mod tensor;
pub mod units;
pub mod weights;
