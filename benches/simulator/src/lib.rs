//! A simulated world with a virtual clock, in which shadowslice's policies are evaluated.
//!
//! The queue, batcher and sharing policies are those of the `policy` crate, which the supervisor uses
//! too. This crate adds the environment: arrivals, execution and hand-overs.

pub mod bound;
pub mod loads;
pub mod perturb;
mod random;
pub mod results;
pub mod scenario;
mod time;
mod timers;
pub mod world;
