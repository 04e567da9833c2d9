//! shadowslice's decisions, apart from their effects.
//!
//! Nothing here reads a clock, does I/O, draws random numbers or waits: time comes in as
//! [`Timestamp`](shadowslice_shared::units::Timestamp)s, facts as values, and decisions go out as values
//! that the caller carries out. So tests and simulations run exactly what serves.

pub mod blame;
pub mod groups;
pub mod latency;
pub mod placement;
pub mod restart;
pub mod scheduler;
pub mod sharing;
pub mod workers;
