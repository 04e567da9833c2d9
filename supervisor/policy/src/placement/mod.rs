//! The placement of models on GPUs.
//!
//! A model needs a number of copies. Each copy needs SMs, memory and bandwidth of one GPU. Placement is
//! therefore a packing problem in three dimensions, with these constraints:
//!
//! * The models on a GPU do not exceed its SMs, memory or bandwidth.
//! * Each GPU keeps enough free memory for the largest shadow of its models.
//! * Each host has at most one copy of a model, because all GPUs of a host can fail together.
//!
//! Among all placements that satisfy the constraints, [`place`] returns the placement with the lowest
//! [`Cost`].

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

/// The quantity that a placement minimises. The number of missing copies is always minimised first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Objective {
    /// The number of GPUs, then the number of moves. This objective suits a fleet, in which each host
    /// costs money.
    FewGpus,
    /// The number of moves, then the imbalance of the GPUs. This objective suits the GPUs of one host,
    /// which cost the same whether they are used or not.
    FewMoves,
}

/// A GPU that can take copies.
#[derive(Debug, Clone, PartialEq)]
pub struct GpuCapacity {
    /// The index of the host, which is the same for all GPUs of a host.
    pub host: usize,
    /// The SMs that the copy needs on this GPU.
    pub sms: Sms,
    /// The memory that the copy needs, in bytes.
    pub memory: u64,
    /// The resources that models outside this placement use.
    pub taken: Share,
}

/// A model to place.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelCopies {
    /// The number of copies, each on a different host.
    pub copies: u32,
    /// The resources that each copy needs.
    pub each: Share,
    /// The priority. 1 is the highest. Models with a higher priority get their copies first.
    pub priority: u32,
    /// The indices of the GPUs on which the model is at present.
    pub on: Vec<usize>,
}

/// The resources of one copy on a GPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Share {
    /// The number of SMs.
    pub sms: Sms,
    /// The memory, in bytes.
    pub memory: u64,
    /// The memory of a second worker that replaces the first one in a hand-over, in bytes.
    pub shadow: u64,
    /// The fraction of the GPU's memory bandwidth, 0 to 1.
    pub bandwidth: f64,
}

impl Share {
    /// A share without any resources.
    pub const NOTHING: Self = Self { sms: Sms(0), memory: 0, shadow: 0, bandwidth: 0.0 };
}

/// A placement of models on GPUs. The same input always yields the same placement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// The indices of each model's GPUs, ascending.
    pub models: Vec<Vec<usize>>,
    /// The copies that fit on no GPU, by model.
    pub missing: Vec<MissingCopies>,
    /// The cost of the placement.
    pub cost: Cost,
    /// True if no other placement costs less. If this is false, the search reached its limit, and a
    /// better placement may exist.
    pub is_best: bool,
}

impl Placement {
    /// Returns the number of GPUs that have at least one model.
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
    /// The number of copies that fit on no GPU.
    pub copies: u32,
    /// The reason why the copies do not fit.
    pub shortage: Shortage,
}

/// The reason why no GPU can take another copy of a model. Only GPUs on hosts without a copy of the
/// model are considered. `free` is the largest free amount on any of these GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shortage {
    /// No GPU has enough free SMs.
    Sms {
        /// The largest number of free SMs on a GPU.
        free: Sms,
        /// The number of SMs that a copy needs.
        needed: Sms,
    },
    /// No GPU with enough SMs has enough free memory.
    Memory {
        /// The largest amount of free memory on a GPU, in bytes.
        free: u64,
        /// The memory that a copy and its shadow need, in bytes.
        needed: u64,
    },
    /// No GPU with enough SMs and memory has enough bandwidth left.
    Bandwidth,
    /// Every host already has a copy.
    Host,
}

/// The cost of a placement. Costs are compared field by field, in this order.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Cost {
    /// The numbers of copies that fit on no GPU. The first copies of all models come first, in
    /// descending order of priority. The second copies follow, and so on.
    pub missing: Vec<u32>,
    /// The number of GPUs with models if the objective is [`Objective::FewGpus`], otherwise 0.
    pub gpus: u32,
    /// The number of copies that move. A copy moves if the model runs on other GPUs at present, but not
    /// on the GPU of the copy.
    pub moves: u32,
    /// The imbalance of the GPUs if the objective is [`Objective::FewMoves`], otherwise 0. It is the
    /// sum of a square for each GPU: the square of the difference between the SMs of the largest GPU
    /// and the free SMs of this GPU.
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
