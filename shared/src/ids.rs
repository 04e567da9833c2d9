//! Identifiers that several crates use.

/// The id of a worker, which is unique for the lifetime of the supervisor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerId(pub u64);
