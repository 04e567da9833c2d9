//! The floor that decides which requests are let in and what they may use: clients' names and
//! tokens, origins, places and memory that clients share, minimum rates, and the end of serving.
//!
//! This is the lowest floor. The other floors use it, and it uses no other floor.

mod access_entry;
mod bind_error;
mod blocking;
mod budgets;
mod caller;
mod client;
mod clipped;
mod connections;
mod deliveries;
mod memory_permit;
mod min_rate;
mod origin;
mod reloading_file;
mod request_error;
mod stop;
mod tokens;

pub use bind_error::BindError;

pub(crate) use access_entry::{log_error, log_grpc_status};
pub(crate) use blocking::{one_at_a_time, run_blocking};
pub(crate) use budgets::{Budget, Budgets, Owner};
pub(crate) use caller::{Caller, Resource, accept_permitted, peer};
pub(crate) use client::{BudgetShare, Client};
pub(crate) use clipped::Clipped;
pub(crate) use connections::{ConnectionSlot, Connections, overstays};
pub(crate) use deliveries::Deliveries;
#[cfg(test)]
pub(crate) use memory_permit::unlimited;
pub(crate) use memory_permit::{CALL_PERMIT, MemoryPermit, try_allocate};
pub(crate) use min_rate::{MIN_CONNECTION_RATE, MIN_STREAM_RATE, ProgressDeadline, SILENCE_TIMEOUT};
pub(crate) use origin::Origin;
pub(crate) use reloading_file::ReloadingFile;
pub(crate) use request_error::{RequestError, invalid};
pub(crate) use stop::Stop;
pub(crate) use tokens::Tokens;
