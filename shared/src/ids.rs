//! Identifiers that several crates use for the same thing.

/// The number of a worker, unique for the lifetime of the supervisor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerId(pub u64);
