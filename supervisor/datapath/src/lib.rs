//! The data path: sends requests from the queue to a worker, and answers back to the clients.

pub mod access;
pub mod clock;
pub mod heartbeat;
pub mod host_counters;
pub mod peer;
pub mod pipeline;
pub mod readiness;
pub mod relay;
pub mod repository;
pub mod router;
pub mod sockets;
pub mod trace;
