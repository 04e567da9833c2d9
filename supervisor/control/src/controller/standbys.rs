//! The rules for the GPU memory of warm standbys. All memory is in bytes.
//!
//! * A standby starts only if the largest shadow of its GPU still fits beside it, and if all standbys
//!   of the GPU together stay within a limit.
//! * If a worker that is to serve, or a shadow, finds too little memory, standbys yield until it fits:
//!   the lowest priority first, and within a priority the youngest first.
//! * A new standby replaces only standbys of lower priorities, and only if that is enough.

use std::cmp::Reverse;

use crate::backend::gib;

/// The number of a controller. A model has two controllers while a reload replaces the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct OwnerId(pub(super) u64);

/// A warm standby, from its start until its exit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Standby {
    pub(super) owner: OwnerId,
    /// The priority of the model. 1 is the highest.
    pub(super) priority: u32,
    /// The memory that the standby has, or will allocate.
    pub(super) bytes: u64,
    /// True if the standby must exit, because its memory is needed.
    pub(super) yields: bool,
}

/// The worker for which standbys yield.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Beneficiary {
    /// A worker that is to serve, or a shadow.
    Worker,
    /// A standby of a model with this priority.
    Standby { priority: u32 },
}

/// Returns the owners of the standbys that must yield to free this memory. `standbys` starts with the
/// oldest. Standbys that already yield come first, so that no other standby exits for nothing.
pub(super) fn yielding(standbys: &[Standby], bytes: u64, beneficiary: Beneficiary) -> Vec<OwnerId> {
    let may_yield = |standby: &&Standby| match beneficiary {
        Beneficiary::Worker => standby.bytes > 0,
        Beneficiary::Standby { priority } => standby.bytes > 0 && standby.priority > priority,
    };
    let mut able: Vec<&Standby> = standbys.iter().rev().filter(may_yield).collect();
    able.sort_by_key(|standby| (!standby.yields, Reverse(standby.priority)));
    let is_enough = able.iter().map(|standby| standby.bytes).sum::<u64>() >= bytes;
    if !is_enough && beneficiary != Beneficiary::Worker {
        return Vec::new();
    }
    let mut freed = 0;
    let is_needed = |standby: &&Standby| {
        let before = freed;
        freed += standby.bytes;
        before < bytes
    };
    able.into_iter().take_while(is_needed).map(|standby| standby.owner).collect()
}

/// The memory that a standby needs and finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StandbyMemory {
    pub(super) needed: u64,
    /// True if the worker is already running, so that its memory is allocated.
    pub(super) is_running: bool,
    /// The memory of all other standbys on the GPU.
    pub(super) taken: u64,
    /// The limit on the memory of all standbys on the GPU, if there is one.
    pub(super) limit: Option<u64>,
    /// The memory of the largest shadow that the GPU may get.
    pub(super) shadow: u64,
    /// The free memory of the GPU. This is `None` for an emulated GPU, which has no memory of its own.
    pub(super) free: Option<FreeMemory>,
}

/// The free memory of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FreeMemory {
    pub(super) bytes: u64,
    /// True if a worker has just allocated or freed memory, which the reading may not include.
    pub(super) is_outdated: bool,
}

/// The reason why a model has no standby.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum NoRoom {
    #[error(
        "the GPU memory that a worker of this model needs is unknown; give the model a profile with `memory`"
    )]
    NeedUnknown,
    #[error(
        "the NVIDIA driver does not report the GPU's free memory; the supervisor tries again shortly; if this persists, check `nvidia-smi`"
    )]
    FreeUnknown,
    #[error("another worker has just allocated or freed GPU memory; the supervisor tries again shortly")]
    Lag,
    #[error(
        "the warm standby needs {}, but warm standbys may use {} in total and already use {}; raise `controller.standby_memory`",
        gib(*needed), gib(*limit), gib(*taken)
    )]
    Limit { needed: u64, limit: u64, taken: u64 },
    #[error(
        "the warm standby needs {}, but {} are free, and {} must stay free for a hand-over of the largest model; move a model to another GPU, or set `standby: off`",
        gib(*needed), gib(*free), gib(*kept)
    )]
    Kept { needed: u64, kept: u64, free: u64 },
}

impl NoRoom {
    /// Returns the memory of other standbys that would have to become free.
    pub(super) fn excess(&self) -> u64 {
        match *self {
            Self::NeedUnknown | Self::FreeUnknown | Self::Lag => 0,
            Self::Limit { needed, limit, taken } => taken.saturating_add(needed).saturating_sub(limit),
            Self::Kept { needed, kept, free } => needed.saturating_add(kept).saturating_sub(free),
        }
    }
}

impl StandbyMemory {
    /// Checks that the standby may start. A worker that is already running may become the standby even
    /// if the free memory is unclear: another start would cost more, and the standby can yield later.
    pub(super) fn check(&self) -> Result<(), NoRoom> {
        let Self { needed, taken, shadow: kept, .. } = *self;
        if let Some(limit) = self.limit.filter(|limit| taken.saturating_add(needed) > *limit) {
            return Err(NoRoom::Limit { needed, limit, taken });
        }
        let Some(FreeMemory { bytes: free, is_outdated }) = self.free else { return Ok(()) };
        if is_outdated && !self.is_running {
            return Err(NoRoom::Lag);
        }
        let needed = if self.is_running { 0 } else { needed };
        if needed.saturating_add(kept) > free { Err(NoRoom::Kept { needed, kept, free }) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns standbys with these priorities and sizes. Each owner is the index of its standby.
    fn standbys(of: &[(u32, u64)]) -> Vec<Standby> {
        let standby = |(index, &(priority, bytes))| Standby {
            owner: OwnerId(index as u64),
            priority,
            bytes,
            yields: false,
        };
        of.iter().enumerate().map(standby).collect()
    }

    fn owners(standbys: &[Standby], bytes: u64, beneficiary: Beneficiary) -> Vec<u64> {
        yielding(standbys, bytes, beneficiary).into_iter().map(|OwnerId(owner)| owner).collect()
    }

    #[test]
    fn the_lowest_priority_yields_first_and_within_a_priority_the_youngest() {
        let all = standbys(&[(2, 5), (1, 5), (3, 5), (2, 5)]);
        assert_eq!(owners(&all, 1, Beneficiary::Worker), [2]);
        assert_eq!(owners(&all, 6, Beneficiary::Worker), [2, 3]);
        assert_eq!(owners(&all, 15, Beneficiary::Worker), [2, 3, 0]);
        assert_eq!(owners(&all, 99, Beneficiary::Worker), [2, 3, 0, 1], "a worker gets what there is");
        assert!(owners(&all, 0, Beneficiary::Worker).is_empty());
        assert!(owners(&standbys(&[(1, 0)]), 1, Beneficiary::Worker).is_empty(), "its memory is unknown");
    }

    #[test]
    fn a_standby_replaces_only_lower_priorities_and_only_if_that_is_enough() {
        let all = standbys(&[(2, 5), (1, 5), (3, 5), (2, 5)]);
        let owners_for = |bytes, priority| owners(&all, bytes, Beneficiary::Standby { priority });
        assert_eq!(owners_for(6, 1), [2, 3]);
        assert_eq!(owners_for(5, 2), [2]);
        assert!(owners_for(6, 2).is_empty(), "the standby of priority 3 alone is not enough");
        assert!(owners_for(1, 3).is_empty(), "equal priorities do not replace each other");
    }

    #[test]
    fn memory_that_is_about_to_become_free_counts_first() {
        let mut all = standbys(&[(2, 5), (3, 5)]);
        all[0].yields = true;
        assert_eq!(owners(&all, 4, Beneficiary::Worker), [0]);
        assert_eq!(owners(&all, 6, Beneficiary::Worker), [0, 1]);
        assert_eq!(owners(&all, 4, Beneficiary::Standby { priority: 1 }), [0]);
    }

    #[test]
    fn the_largest_shadow_still_fits_beside_a_standby() {
        let free = |bytes, is_outdated| Some(FreeMemory { bytes, is_outdated });
        let memory = StandbyMemory {
            needed: 2,
            is_running: false,
            taken: 3,
            limit: Some(5),
            shadow: 4,
            free: free(6, false),
        };
        assert_eq!(memory.check(), Ok(()));
        let kept = StandbyMemory { free: free(5, false), ..memory }.check().unwrap_err();
        assert_eq!((&kept, kept.excess()), (&NoRoom::Kept { needed: 2, kept: 4, free: 5 }, 1));
        assert_eq!(StandbyMemory { free: free(4, true), is_running: true, ..memory }.check(), Ok(()));
        assert_eq!(StandbyMemory { free: free(9, true), ..memory }.check(), Err(NoRoom::Lag));
        assert_eq!(StandbyMemory { free: None, shadow: 99, ..memory }.check(), Ok(()));
        let limit = StandbyMemory { taken: 5, free: None, ..memory }.check().unwrap_err();
        assert_eq!((&limit, limit.excess()), (&NoRoom::Limit { needed: 2, limit: 5, taken: 5 }, 2));
    }
}
