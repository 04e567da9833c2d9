//! shadowslice's decisions, apart from their effects.
//!
//! Nothing here reads a clock, does I/O, draws random numbers or waits: time comes in as
//! [`Moment`](shadowslice_shared::units::Moment)s, facts as values, and decisions go out as values
//! that someone else carries out. So tests and simulations run exactly what serves.
//!
//! On the way of a request: [`door`] says whether it can still be answered in time, [`queue`] holds it,
//! [`batcher`] says when it runs and with whom, [`punctual`] who of those that wait is in time, [`late`] whether it still runs when its deadline has
//! passed, [`latency`] how long that should take, [`blame`] what becomes of it when its worker dies, and
//! [`restart`] when the next worker starts. [`handover`] replaces a worker by its shadow, [`groups`] says which SMs a partition has. [`sharing`] divides the GPUs by what was
//! seen.

pub mod batcher;
pub mod blame;
pub mod door;
pub mod groups;
pub mod handover;
pub mod late;
pub mod latency;
pub mod punctual;
pub mod queue;
pub mod restart;
pub mod sharing;
