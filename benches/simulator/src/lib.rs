//! A simulated world with a virtual clock, for the evaluation of shadowslice's policies.
//!
//! The queue, the batcher and the sharing policies come from the `policy` crate, which the
//! supervisor also uses. This crate adds the environment of a policy: arrivals, execution and
//! hand-overs. It also adds the policies with which evaluations compare the supervisor's policies.

pub mod baselines;
pub mod bound;
pub mod loads;
pub mod perturb;
mod random;
pub mod results;
pub mod scenario;
mod time;
mod timers;
pub mod world;
