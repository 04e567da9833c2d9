//! The decisions of shadowslice, without their side effects.
//!
//! This crate reads no clock, does no I/O, draws no random numbers and never blocks. Its input consists
//! of [`Timestamp`](shadowslice_shared::units::Timestamp)s and other values. Its output consists of
//! decisions, which the caller applies. Tests and simulations can therefore run the same code as the
//! supervisor.

#![warn(missing_docs)]

pub mod backoff;
pub mod blame;
pub mod groups;
pub mod latency;
pub mod pauses;
pub mod placement;
pub mod reconcile;
pub mod residency;
pub mod restart;
pub mod rollout;
pub mod scheduler;
pub mod sharing;
pub mod sm_time;
pub mod tenants;
pub mod workers;
