//! Identifiers that several crates use.

/// The id of a worker, which is unique among all workers that its model ever has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerId(pub u64);
