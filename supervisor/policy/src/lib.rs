//! shadowslice's decisions, apart from their effects.
//!
//! Nothing here reads a clock, does I/O, draws random numbers or waits: time comes in as
//! [`Moment`](shadowslice_shared::units::Moment)s, facts as values, and decisions go out as values
//! that the caller carries out. So tests and simulations run exactly what serves.
//!
//! [`scheduler`] takes a model's requests from their arrival to batches on its workers' lanes,
//! [`latency`] says how long those batches should take, and [`blame`] what becomes of a request when
//! its worker dies. [`workers`] says which workers a model has and which one has the traffic,
//! [`restart`] when the next one starts, and [`groups`] which SMs a partition has. [`sharing`]
//! divides the GPUs by what was seen.

pub mod blame;
pub mod groups;
pub mod latency;
pub mod restart;
pub mod scheduler;
pub mod sharing;
pub mod workers;
