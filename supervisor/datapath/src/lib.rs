//! The data path. It sends requests from a model's queue to a worker, and the worker's answers to
//! the clients.

pub mod access;
pub mod clock;
pub mod heartbeat;
pub mod host_counters;
pub mod log_throttle;
pub mod peer;
pub mod phase;
pub mod pipeline;
pub mod readiness;
pub mod relay;
pub mod repository;
pub mod router;
pub mod sockets;
pub mod tenants;
pub mod trace;
pub mod versions;
