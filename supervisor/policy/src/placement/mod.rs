//! Which GPUs have which models.
//!
//! A model asks for copies. Each needs SMs, memory and bandwidth of one GPU, so this is packing in
//! three dimensions: nothing is exceeded, memory has room for the largest shadow of a GPU's models,
//! and a host, which fails as a whole, has one copy of a model at most. Among the ways to do that,
//! [`place`] takes the one with the least [`Cost`].

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

/// What a placement saves, once all that can be has a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Objective {
    /// GPUs, and then moves: for hosts that cost something each.
    FewGpus,
    /// Moves, and then the GPUs get alike: for the GPUs of one host, which are there anyway.
    FewMoves,
}

#[derive(Debug, Clone, PartialEq)]
pub struct GpuCapacity {
    /// GPUs with the same number are one host's.
    pub host: usize,
    pub sms: Sms,
    /// In bytes.
    pub memory: u64,
    /// What is not to be placed has of it.
    pub taken: Share,
}

#[derive(Debug, Clone, PartialEq)]
pub struct ModelCopies {
    /// On as many hosts.
    pub copies: u32,
    pub each: Share,
    /// 1 is the highest; models of a higher one get their copies first.
    pub priority: u32,
    /// The GPUs that have it, by index.
    pub on: Vec<usize>,
}

/// What one copy takes of a GPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Share {
    pub sms: Sms,
    /// In bytes.
    pub memory: u64,
    /// What a second worker takes meanwhile, when the first is replaced; in bytes.
    pub shadow: u64,
    /// The part of the GPU's memory bandwidth, 0 to 1.
    pub bandwidth: f64,
}

impl Share {
    pub const NOTHING: Self = Self { sms: Sms(0), memory: 0, shadow: 0, bandwidth: 0.0 };
}

/// The same facts have the same placement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// Of each model the GPUs, ascending.
    pub models: Vec<Vec<usize>>,
    /// Copies for which there is no room, by model.
    pub missing: Vec<MissingCopies>,
    pub cost: Cost,
    /// Whether no placement costs less; else the search ended at its bound, and one might.
    pub is_best: bool,
}

impl Placement {
    /// How many GPUs have models.
    pub fn gpus_used(&self) -> usize {
        let used: BTreeSet<&usize> = self.models.iter().flatten().collect();
        used.len()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MissingCopies {
    pub model: usize,
    pub copies: u32,
    pub shortage: Shortage,
}

/// Why no GPU of a host without a copy of the model can take one. `free` is the most that one of them has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shortage {
    Sms {
        free: Sms,
        needed: Sms,
    },
    /// In bytes.
    Memory {
        free: u64,
        needed: u64,
    },
    Bandwidth,
    /// Every host has a copy.
    Host,
}

/// Compared in this order.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Cost {
    /// Copies without a place: first copies by falling priority, then second copies, and so on.
    pub missing: Vec<u32>,
    /// GPUs that have models, where these are to be few; else 0.
    pub gpus: u32,
    /// Copies on GPUs that do not have their model now, though another GPU has it.
    pub moves: u32,
    /// The squares of the SMs that each GPU has free less than the largest GPU has, added up, where
    /// GPUs are to get alike; else 0.
    pub load_spread: u64,
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sms { free, needed } => {
                write!(f, "it needs {} SMs, and no GPU has more than {} free", needed.0, free.0)
            }
            Self::Memory { free, needed } => write!(
                f,
                "it needs {} MiB with room for a shadow, and no GPU with the SMs has more than {} MiB free",
                needed.div_ceil(1 << 20),
                free >> 20
            ),
            Self::Bandwidth => f.write_str("the GPUs with room have no memory bandwidth left for it"),
            Self::Host => f.write_str("no host is left without a copy of it"),
        }
    }
}
