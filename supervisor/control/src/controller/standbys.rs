//! The rules for the GPU memory of warm standbys. All memory is in bytes.
//!
//! * A standby starts only if the largest shadow of its GPU still fits beside it, and if all standbys
//!   of the GPU together stay within a limit.
//! * If a worker that is to serve, or a shadow, finds too little memory, standbys yield until it fits:
//!   the lowest priority first, and within a priority the youngest first.
//! * A new standby replaces only standbys of lower priorities, and only if that is enough.

use std::cmp::Reverse;

use crate::backend::gib;

/// A warm standby, from its start until its exit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Standby {
    /// The priority of the model. 1 is the highest.
    pub(super) priority: u32,
    /// The number of the start. Younger standbys have larger numbers.
    pub(super) started: u64,
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

/// Returns the standbys that must yield to free this memory. Standbys that already yield come first, so
/// that no other standby exits for nothing.
pub(super) fn yielding<'s>(
    standbys: impl Iterator<Item = &'s mut Standby>,
    bytes: u64,
    beneficiary: Beneficiary,
) -> Vec<&'s mut Standby> {
    let may_yield = |standby: &&mut Standby| match beneficiary {
        Beneficiary::Worker => standby.bytes > 0,
        Beneficiary::Standby { priority } => standby.bytes > 0 && standby.priority > priority,
    };
    let mut chosen: Vec<&mut Standby> = standbys.filter(may_yield).collect();
    chosen.sort_by_key(|standby| (!standby.yields, Reverse((standby.priority, standby.started))));
    let freed = |count: usize| chosen[..count].iter().map(|standby| standby.bytes).sum::<u64>();
    let enough = (0..=chosen.len()).find(|&count| freed(count) >= bytes);
    let all_of_them = if beneficiary == Beneficiary::Worker { chosen.len() } else { 0 };
    chosen.truncate(enough.unwrap_or(all_of_them));
    chosen
}

/// The latest reading of a GPU's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FreeMemory {
    /// An emulated GPU has no memory of its own.
    Emulated,
    /// The driver does not report the memory.
    Unknown,
    /// The memory that is free and not reserved for a worker, and the GPU's whole memory.
    Real { free: u64, total: u64 },
}

/// The other workers of a GPU, as far as they decide about a new standby.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Neighbours {
    /// True if a worker has just allocated or freed memory, which a reading may not include.
    pub(super) have_changed: bool,
    /// The memory of all other standbys.
    pub(super) standbys: u64,
    /// The limit on the memory of all standbys. `None` means half of the GPU's memory.
    pub(super) limit: Option<u64>,
    /// The memory of the largest shadow that the GPU may get.
    pub(super) shadow: u64,
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

impl Neighbours {
    /// Checks that there is memory for a standby with this need. If a running worker is to become the
    /// standby, it has its memory, and an outdated reading does not matter: another start would cost
    /// more, and the standby can yield later.
    pub(super) fn leave_room(
        &self,
        need: Option<u64>,
        found: FreeMemory,
        is_running: bool,
    ) -> Result<(), NoRoom> {
        let (needed, limit) = match (found, need) {
            (FreeMemory::Emulated, need) => (need.unwrap_or(0), self.limit),
            (_, None) => return Err(NoRoom::NeedUnknown),
            (FreeMemory::Unknown, _) => return Err(NoRoom::FreeUnknown),
            (FreeMemory::Real { total, .. }, Some(need)) => (need, self.limit.or(Some(total / 2))),
        };
        let (taken, kept) = (self.standbys, self.shadow);
        if let Some(limit) = limit.filter(|limit| taken.saturating_add(needed) > *limit) {
            return Err(NoRoom::Limit { needed, limit, taken });
        }
        let FreeMemory::Real { free, .. } = found else { return Ok(()) };
        if self.have_changed && !is_running {
            return Err(NoRoom::Lag);
        }
        let needed = if is_running { 0 } else { needed };
        if needed.saturating_add(kept) > free { Err(NoRoom::Kept { needed, kept, free }) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns standbys with these priorities and sizes, the oldest first.
    fn standbys(of: &[(u32, u64)]) -> Vec<Standby> {
        let standby = |(started, &(priority, bytes))| Standby { priority, started, bytes, yields: false };
        (0..).zip(of).map(standby).collect()
    }

    /// Returns the indices of the standbys that yield.
    fn indices(standbys: &[Standby], bytes: u64, beneficiary: Beneficiary) -> Vec<u64> {
        let mut standbys = standbys.to_vec();
        yielding(standbys.iter_mut(), bytes, beneficiary).iter().map(|standby| standby.started).collect()
    }

    #[test]
    fn the_lowest_priority_yields_first_and_within_a_priority_the_youngest() {
        let all = standbys(&[(2, 5), (1, 5), (3, 5), (2, 5)]);
        assert_eq!(indices(&all, 1, Beneficiary::Worker), [2]);
        assert_eq!(indices(&all, 6, Beneficiary::Worker), [2, 3]);
        assert_eq!(indices(&all, 15, Beneficiary::Worker), [2, 3, 0]);
        assert_eq!(indices(&all, 99, Beneficiary::Worker), [2, 3, 0, 1], "a worker gets what there is");
        assert!(indices(&all, 0, Beneficiary::Worker).is_empty());
        assert!(indices(&standbys(&[(1, 0)]), 1, Beneficiary::Worker).is_empty(), "its memory is unknown");
    }

    #[test]
    fn a_standby_replaces_only_lower_priorities_and_only_if_that_is_enough() {
        let all = standbys(&[(2, 5), (1, 5), (3, 5), (2, 5)]);
        let indices_for = |bytes, priority| indices(&all, bytes, Beneficiary::Standby { priority });
        assert_eq!(indices_for(6, 1), [2, 3]);
        assert_eq!(indices_for(5, 2), [2]);
        assert!(indices_for(6, 2).is_empty(), "the standby of priority 3 alone is not enough");
        assert!(indices_for(1, 3).is_empty(), "equal priorities do not replace each other");
    }

    #[test]
    fn memory_that_is_about_to_become_free_counts_first() {
        let mut all = standbys(&[(2, 5), (3, 5)]);
        all[0].yields = true;
        assert_eq!(indices(&all, 4, Beneficiary::Worker), [0]);
        assert_eq!(indices(&all, 6, Beneficiary::Worker), [0, 1]);
        assert_eq!(indices(&all, 4, Beneficiary::Standby { priority: 1 }), [0]);
    }

    #[test]
    fn the_largest_shadow_still_fits_beside_a_standby() {
        let real = |free| FreeMemory::Real { free, total: 20 };
        let others = Neighbours { have_changed: false, standbys: 3, limit: Some(5), shadow: 4 };
        assert_eq!(others.leave_room(Some(2), real(6), false), Ok(()));
        let kept = others.leave_room(Some(2), real(5), false).unwrap_err();
        assert_eq!((&kept, kept.excess()), (&NoRoom::Kept { needed: 2, kept: 4, free: 5 }, 1));
        let changed = Neighbours { have_changed: true, ..others };
        assert_eq!(changed.leave_room(Some(2), real(9), false), Err(NoRoom::Lag));
        assert_eq!(changed.leave_room(Some(2), real(4), true), Ok(()));
        assert_eq!(changed.leave_room(Some(2), FreeMemory::Emulated, false), Ok(()));
        let limit = others.leave_room(Some(3), FreeMemory::Emulated, false).unwrap_err();
        assert_eq!((&limit, limit.excess()), (&NoRoom::Limit { needed: 3, limit: 5, taken: 3 }, 1));
        let half = Neighbours { standbys: 9, limit: None, ..others }.leave_room(Some(2), real(6), false);
        assert_eq!(half, Err(NoRoom::Limit { needed: 2, limit: 10, taken: 9 }));
    }
}
