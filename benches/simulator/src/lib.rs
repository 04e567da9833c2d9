//! A simulated world with a virtual clock, in which shadowslice's policies are evaluated.
//!
//! The queue, the batcher and the sharing policies come from the `policy` crate, which the
//! supervisor also uses. This crate adds the environment: arrivals, execution and hand-overs.

pub mod bound;
pub mod loads;
pub mod perturb;
mod random;
pub mod results;
pub mod scenario;
mod time;
mod timers;
pub mod world;
