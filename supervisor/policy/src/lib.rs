//! shadowslice's decisions, without their effects.
//!
//! This crate reads no clock, does no I/O, draws no random numbers and never blocks. Its input is
//! [`Timestamp`](shadowslice_shared::units::Timestamp)s and values; its output is decisions, which the
//! caller carries out. Tests and simulations therefore run the same code as the supervisor.

#![warn(missing_docs)]

pub mod blame;
pub mod groups;
pub mod latency;
pub mod placement;
pub mod restart;
pub mod scheduler;
pub mod sharing;
pub mod workers;
