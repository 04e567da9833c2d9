//! The placement of models on GPUs.
//!
//! A model needs a number of copies. Each copy needs SMs, memory and bandwidth of one GPU. Placement
//! is therefore packing in three dimensions, with these constraints:
//!
//! * A GPU's resources are not exceeded.
//! * Each GPU keeps enough memory for the largest shadow of its models.
//! * A host, which fails as a whole, has at most one copy of a model.
//!
//! Among the placements that satisfy them, [`place`] returns the one with the least [`Cost`].

mod assign;
mod requirement;
mod search;

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::fmt;

use shadowslice_shared::units::Sms;

pub use assign::{GpuAssignment, HostTenant, assign_gpus};
pub use requirement::{CopyLoad, SmRequirement, UnmetLoad, sm_requirement};
pub use search::place;

/// The quantity that a placement minimises after missing copies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Objective {
    /// The number of GPUs, then moves: for hosts that each cost money.
    FewGpus,
    /// The number of moves, then the imbalance of the GPUs: for the GPUs of one host, which are
    /// there anyway.
    FewMoves,
}

/// A GPU that can take copies.
#[derive(Debug, Clone, PartialEq)]
pub struct GpuCapacity {
    /// The host's number, the same for all GPUs of one host.
    pub host: usize,
    /// The number of SMs.
    pub sms: Sms,
    /// The memory, in bytes.
    pub memory: u64,
    /// The resources that models outside of this placement use.
    pub taken: Share,
}

/// A model to place.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelCopies {
    /// The number of copies, each on another host.
    pub copies: u32,
    /// The resources of each copy.
    pub each: Share,
    /// The priority; 1 is the highest. Models of a higher priority get their copies first.
    pub priority: u32,
    /// The indices of the GPUs that have the model now.
    pub on: Vec<usize>,
}

/// The resources of one copy on a GPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Share {
    /// The number of SMs.
    pub sms: Sms,
    /// The memory, in bytes.
    pub memory: u64,
    /// The memory of a second worker while it replaces the first, in bytes.
    pub shadow: u64,
    /// The part of the GPU's memory bandwidth, 0 to 1.
    pub bandwidth: f64,
}

impl Share {
    /// A share without resources.
    pub const NOTHING: Self = Self { sms: Sms(0), memory: 0, shadow: 0, bandwidth: 0.0 };
}

/// A placement. The same input always has the same placement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// The GPUs of each model, ascending.
    pub models: Vec<Vec<usize>>,
    /// The copies without a place, by model.
    pub missing: Vec<MissingCopies>,
    /// The cost of the placement.
    pub cost: Cost,
    /// True if no placement costs less. Otherwise the search reached its bound, and a better one
    /// may exist.
    pub is_best: bool,
}

impl Placement {
    /// Returns the number of GPUs that have models.
    pub fn gpus_used(&self) -> usize {
        let used: BTreeSet<&usize> = self.models.iter().flatten().collect();
        used.len()
    }
}

/// The copies of a model that fit on no GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MissingCopies {
    /// The index of the model.
    pub model: usize,
    /// The number of copies without a place.
    pub copies: u32,
    /// The reason.
    pub shortage: Shortage,
}

/// The reason why no GPU on a host without a copy of the model can take one. `free` is the most
/// that one of these GPUs has free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shortage {
    /// No GPU has enough free SMs.
    Sms {
        /// The most free SMs of a GPU.
        free: Sms,
        /// The SMs of a copy.
        needed: Sms,
    },
    /// No GPU with enough SMs has enough free memory.
    Memory {
        /// The most free memory of a GPU, in bytes.
        free: u64,
        /// The memory of a copy and its shadow, in bytes.
        needed: u64,
    },
    /// No GPU with enough SMs and memory has enough bandwidth left.
    Bandwidth,
    /// Every host has a copy.
    Host,
}

/// The cost of a placement. Costs compare field by field, in this order.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Cost {
    /// The copies without a place: first copies by falling priority, then second copies, and so on.
    pub missing: Vec<u32>,
    /// The number of GPUs with models under [`Objective::FewGpus`]; else 0.
    pub gpus: u32,
    /// The copies on GPUs that do not have their model now, although another GPU has it.
    pub moves: u32,
    /// The imbalance of the GPUs under [`Objective::FewMoves`]; else 0. It is the sum of the
    /// squares of the SMs that each GPU has free less than the largest GPU has.
    pub load_spread: u64,
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sms { free, needed } => {
                write!(f, "a copy needs {} SMs, and no GPU has more than {} free", needed.0, free.0)
            }
            Self::Memory { free, needed } => write!(
                f,
                "a copy and its shadow need {} MiB, and no GPU with enough SMs has more than {} MiB free",
                needed.div_ceil(1 << 20),
                free >> 20
            ),
            Self::Bandwidth => {
                f.write_str("no GPU with enough SMs and memory has enough memory bandwidth left")
            }
            Self::Host => f.write_str("every host already has a copy"),
        }
    }
}
