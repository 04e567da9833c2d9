//! The emulated GPU's state, shared by all its workers: which execute now, and on which SMs.
//!
//! A worker writes what it occupies to the *seat* that the supervisor gave it while it executes,
//! and zeros otherwise, and then raises the generation, on which the other workers wait. When a
//! worker is dead the supervisor clears its seat. How workers slow each other down is computed in
//! [`contention`](crate::contention).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::contention::{ClientPriority, Occupant};
use crate::groups::Groups;
use crate::slab::{SharedWords, SlabError};
use crate::units::Sms;

/// Workers on one emulated GPU at a time.
pub const SEATS: u32 = 1024;

/// The SMs, the groups, low half first, the priority, and as bits of an `f32` the turn, the kernels
/// and the time alone.
const SEAT_WORDS: u32 = 7;

/// The generation, then the seats.
const WORDS: u32 = 1 + SEATS * SEAT_WORDS;

#[derive(Debug)]
pub struct Pool {
    words: SharedWords,
}

impl Pool {
    pub fn create() -> Result<Self, SlabError> {
        SharedWords::create("shadowslice-pool", WORDS).map(|words| Self { words })
    }

    pub fn adopt(file: OwnedFd) -> Result<Self, SlabError> {
        SharedWords::adopt(file, WORDS).map(|words| Self { words })
    }

    /// Changes whenever a worker starts or stops executing.
    pub fn generation(&self) -> &AtomicU32 {
        &self.words.words()[0]
    }

    /// `None` when the worker stops. The caller then wakes the workers that wait on the generation.
    /// A seat that does not exist changes nothing.
    pub fn occupy(&self, seat: u32, occupant: Option<Occupant>) {
        let Occupant { sms, groups, priority, turn, kernels, alone } =
            occupant.unwrap_or(Occupant::anywhere(Sms(0)));
        if let Some(words) = self.seats().nth(seat as usize) {
            let bits = groups.bits();
            words[1].store(bits as u32, Ordering::Release);
            words[2].store((bits >> 32) as u32, Ordering::Release);
            words[3].store(priority as u32, Ordering::Release);
            for (word, value) in words[4..].iter().zip([turn, kernels, alone]) {
                word.store(value.to_bits(), Ordering::Release);
            }
            words[0].store(sms.0, Ordering::Release);
            self.generation().fetch_add(1, Ordering::Release);
        }
    }

    /// Summed over all workers that execute now: more than the GPU has under contention.
    pub fn in_use(&self) -> u64 {
        self.occupants().map(|(_, occupant)| u64::from(occupant.sms.0)).sum()
    }

    pub fn others(&self, seat: u32) -> impl Iterator<Item = Occupant> + Clone {
        self.occupants().filter(move |(other, _)| *other != seat).map(|(_, occupant)| occupant)
    }

    fn occupants(&self) -> impl Iterator<Item = (u32, Occupant)> + Clone {
        let read = |words: &[AtomicU32]| {
            let sms = Sms(words[0].load(Ordering::Acquire));
            let half = |word: usize| u64::from(words[word].load(Ordering::Acquire));
            let groups = Groups::from_bits(half(1) | half(2) << 32);
            let below = words[3].load(Ordering::Acquire) == ClientPriority::Below as u32;
            let priority = if below { ClientPriority::Below } else { ClientPriority::Normal };
            let [turn, kernels, alone] =
                [4, 5, 6].map(|word: usize| f32::from_bits(words[word].load(Ordering::Acquire)));
            (sms.0 > 0).then_some(Occupant { sms, groups, priority, turn, kernels, alone })
        };
        (0..).zip(self.seats()).filter_map(move |(seat, words)| Some((seat, read(words)?)))
    }

    fn seats(&self) -> impl Iterator<Item = &[AtomicU32]> + Clone {
        self.words.words()[1..].chunks_exact(SEAT_WORDS as usize)
    }
}

impl AsFd for Pool {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.words.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_dead_worker_held_comes_back() {
        let pool = Pool::create().unwrap();
        pool.occupy(0, Some(Occupant::anywhere(Sms(40))));
        pool.occupy(3, Some(Occupant::anywhere(Sms(100))));
        pool.occupy(SEATS, Some(Occupant::anywhere(Sms(7))));
        assert_eq!(pool.in_use(), 140);
        let before = pool.generation().load(Ordering::Acquire);
        pool.occupy(3, None);
        assert_eq!(pool.in_use(), 40);
        assert_ne!(pool.generation().load(Ordering::Acquire), before);
    }

    #[test]
    fn a_seat_tells_all_of_its_occupant_to_the_others_and_nothing_to_itself() {
        let pool = Pool::create().unwrap();
        let groups = [0, 63].into_iter().collect();
        let priority = ClientPriority::Below;
        let occupant = Occupant { sms: Sms(8), groups, priority, turn: 2.5, kernels: 9.0, alone: 0.5 };
        pool.occupy(5, Some(occupant));
        assert_eq!(pool.others(5).count(), 0);
        assert_eq!(pool.others(6).collect::<Vec<_>>(), [occupant]);
    }
}
