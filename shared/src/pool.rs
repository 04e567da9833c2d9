//! The *pool* is the state of an emulated GPU in shared memory. It shows which workers are executing a
//! batch, and on which SMs.
//!
//! The supervisor gives each worker a *seat*, a fixed place in this memory. While a worker executes a
//! batch, its seat contains the SMs that the worker occupies and the figures that the contention model
//! needs. At other times the seat is all zeros. After each change, the worker increments the generation
//! counter, on which the other workers wait. If a worker dies, the supervisor clears the worker's seat.
//! The module [`contention`](crate::contention) computes how workers slow each other down.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::contention::{ClientPriority, Occupant};
use crate::groups::Groups;
use crate::slab::{SharedWords, SlabError};
use crate::units::Sms;

/// The maximum number of workers on one emulated GPU at a time.
pub const SEATS: u32 = 1024;

/// The number of 32-bit words in a seat. They are the number of SMs, the lower and the upper half of
/// the groups, the priority, and the bits of three `f32` values: `turn`, `kernels` and `alone`.
const SEAT_WORDS: u32 = 7;

/// The number of 32-bit words in the pool: one for the generation counter, and [`SEAT_WORDS`] for each
/// seat.
const WORDS: u32 = 1 + SEATS * SEAT_WORDS;

/// The shared state of an emulated GPU.
#[derive(Debug)]
pub struct Pool {
    words: SharedWords,
}

impl Pool {
    /// Creates the state of a GPU without workers.
    pub fn create() -> Result<Self, SlabError> {
        SharedWords::create("shadowslice-pool", WORDS).map(|words| Self { words })
    }

    /// Maps the state in `file`, which another process created.
    pub fn adopt(file: OwnedFd) -> Result<Self, SlabError> {
        SharedWords::adopt(file, WORDS).map(|words| Self { words })
    }

    /// Returns the generation counter, which changes when a worker starts or stops executing.
    pub fn generation(&self) -> &AtomicU32 {
        &self.words.words()[0]
    }

    /// Writes the occupant of this seat, or clears the seat if the worker stops executing (`None`). The
    /// caller must then wake the workers that wait on the generation counter. Ignores seats that do not
    /// exist.
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

    /// Returns the sum of the SMs of all workers that are executing a batch. If workers share SMs, the
    /// sum can exceed the GPU's SMs.
    pub fn sms_in_use(&self) -> u64 {
        self.occupants().map(|(_, occupant)| u64::from(occupant.sms.0)).sum()
    }

    /// Returns the occupants of all seats except `seat` whose workers are executing a batch.
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
    fn a_cleared_seat_frees_its_sms() {
        let pool = Pool::create().unwrap();
        pool.occupy(0, Some(Occupant::anywhere(Sms(40))));
        pool.occupy(3, Some(Occupant::anywhere(Sms(100))));
        pool.occupy(SEATS, Some(Occupant::anywhere(Sms(7))));
        assert_eq!(pool.sms_in_use(), 140);
        let before = pool.generation().load(Ordering::Acquire);
        pool.occupy(3, None);
        assert_eq!(pool.sms_in_use(), 40);
        assert_ne!(pool.generation().load(Ordering::Acquire), before);
    }

    #[test]
    fn a_seat_shows_its_whole_occupant_to_others_only() {
        let pool = Pool::create().unwrap();
        let groups = [0, 63].into_iter().collect();
        let priority = ClientPriority::Below;
        let occupant = Occupant { sms: Sms(8), groups, priority, turn: 2.5, kernels: 9.0, alone: 0.5 };
        pool.occupy(5, Some(occupant));
        assert_eq!(pool.others(5).count(), 0);
        assert_eq!(pool.others(6).collect::<Vec<_>>(), [occupant]);
    }
}
