//! A world with a virtual clock, in which shadowslice's policies are judged.
//!
//! The code that decides here is the code that serves: the `policy` crate's queue, batcher and
//! sharing policies. What this crate adds is what they decide about: arrivals, execution,
//! hand-overs.

pub mod bound;
pub mod loads;
pub mod perturb;
mod random;
pub mod results;
pub mod scenario;
mod time;
mod timers;
pub mod world;
