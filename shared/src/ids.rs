//! Names that several parts use for the same thing.

/// Names a worker for the life of its supervisor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerId(pub u64);
