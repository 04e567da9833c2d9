//! The emulated GPU's state, shared by all its workers: which of them execute now, on how many SMs.
//!
//! A worker sits at a *seat* that the supervisor gave it. It writes the SMs it may use there while
//! it executes, zero otherwise, and then bumps the generation, on which the others wait. When a
//! worker is dead the supervisor clears its seat, so that what it held comes back.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::slab::{SharedWords, SlabError};
use crate::units::Sms;

/// Seats in a pool: workers on one emulated GPU at a time.
pub const SEATS: u32 = 1024;

/// The generation, then a word a seat.
const WORDS: u32 = 1 + SEATS;

/// The shared state of an emulated GPU.
#[derive(Debug)]
pub struct Pool {
    words: SharedWords,
}

impl Pool {
    /// A pool in which nobody executes.
    pub fn create() -> Result<Self, SlabError> {
        SharedWords::create("shadowslice-pool", WORDS).map(|words| Self { words })
    }

    /// The pool that a worker inherited.
    pub fn adopt(file: OwnedFd) -> Result<Self, SlabError> {
        SharedWords::adopt(file, WORDS).map(|words| Self { words })
    }

    /// The word that changes whenever somebody starts or stops.
    pub fn generation(&self) -> &AtomicU32 {
        &self.words.words()[0]
    }

    /// Puts `sms` at a seat; zero when it stops. The caller then wakes who waits on the generation.
    /// A seat that does not exist changes nothing.
    pub fn occupy(&self, seat: u32, sms: Sms) {
        if let Some(word) = self.seats().get(seat as usize) {
            word.store(sms.0, Ordering::Release);
            self.generation().fetch_add(1, Ordering::Release);
        }
    }

    /// The SMs that all who execute now may use together; more than the GPU has under contention.
    pub fn in_use(&self) -> u64 {
        let held = self.seats().iter().map(|word| u64::from(word.load(Ordering::Acquire)));
        held.sum()
    }

    fn seats(&self) -> &[AtomicU32] {
        &self.words.words()[1..]
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
        pool.occupy(0, Sms(40));
        pool.occupy(3, Sms(100));
        pool.occupy(SEATS, Sms(7));
        assert_eq!(pool.in_use(), 140);
        let before = pool.generation().load(Ordering::Acquire);
        pool.occupy(3, Sms(0));
        assert_eq!(pool.in_use(), 40);
        assert_ne!(pool.generation().load(Ordering::Acquire), before);
    }
}
