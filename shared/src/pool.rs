//! The emulated GPU's state, shared by all its workers: which of them execute now, on how many SMs, and on which.
//!
//! A worker sits at a *seat* that the supervisor gave it. It writes what it occupies there while
//! it executes, nothing otherwise, and then bumps the generation, on which the others wait. When a
//! worker is dead the supervisor clears its seat, so that what it held comes back.
//!
//! An SM is shared in equal parts by those who may use it. Where a worker's SMs are only counted, as under a percentage,
//! it takes its part of all of them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::groups::{Division, Groups};
use crate::slab::{SharedWords, SlabError};
use crate::units::Sms;

/// Seats in a pool: workers on one emulated GPU at a time.
pub const SEATS: u32 = 1024;

/// Words of a seat: its SMs, and its groups, low half first.
const SEAT_WORDS: u32 = 3;

/// The generation, then the seats.
const WORDS: u32 = 1 + SEATS * SEAT_WORDS;

/// The SMs that a worker may use while it executes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Occupied {
    /// Their number.
    pub sms: Sms,
    /// Which they are; none where they are only counted.
    pub groups: Groups,
}

impl Occupied {
    /// So many SMs, wherever they are.
    pub const fn anywhere(sms: Sms) -> Self {
        Self { sms, groups: Groups::NONE }
    }

    /// A partition's SMs.
    pub fn partition(division: &Division, groups: Groups) -> Self {
        Self { sms: division.sms(groups), groups }
    }
}

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

    /// Puts what a worker occupies at its seat; `None` when it stops. The caller then wakes who waits on the generation.
    /// A seat that does not exist changes nothing.
    pub fn occupy(&self, seat: u32, occupied: Option<Occupied>) {
        let Occupied { sms, groups } = occupied.unwrap_or(Occupied::anywhere(Sms(0)));
        if let Some(words) = self.seats().nth(seat as usize) {
            let bits = groups.bits();
            words[1].store(bits as u32, Ordering::Release);
            words[2].store((bits >> 32) as u32, Ordering::Release);
            words[0].store(sms.0, Ordering::Release);
            self.generation().fetch_add(1, Ordering::Release);
        }
    }

    /// The SMs that all who execute now may use together; more than the GPU has under contention.
    pub fn in_use(&self) -> u64 {
        self.occupied().map(|(_, occupied)| u64::from(occupied.sms.0)).sum()
    }

    /// The SMs that a worker at a seat really has of `own`, on a GPU that divides like this (or not at all), beside all
    /// others that execute.
    pub fn effective(&self, seat: u32, own: Occupied, gpu: Sms, division: Option<&Division>) -> f64 {
        let others = self.occupied().filter(|(other, _)| *other != seat).map(|(_, occupied)| occupied);
        effective(own, others, gpu, division)
    }

    fn occupied(&self) -> impl Iterator<Item = (u32, Occupied)> {
        let read = |words: &[AtomicU32]| {
            let sms = Sms(words[0].load(Ordering::Acquire));
            let half = |word: usize| u64::from(words[word].load(Ordering::Acquire));
            (sms.0 > 0).then(|| Occupied { sms, groups: Groups::from_bits(half(1) | half(2) << 32) })
        };
        (0..).zip(self.seats()).filter_map(move |(seat, words)| Some((seat, read(words)?)))
    }

    fn seats(&self) -> impl Iterator<Item = &[AtomicU32]> {
        self.words.words()[1..].chunks_exact(SEAT_WORDS as usize)
    }
}

/// The SMs that somebody really has of `own` beside these others: of each group the part that is left by those who may use
/// it, too; of SMs that are only counted, the GPU's in proportion.
pub fn effective(
    own: Occupied,
    others: impl Iterator<Item = Occupied>,
    gpu: Sms,
    division: Option<&Division>,
) -> f64 {
    let all = f64::from(gpu.0.max(1));
    let Some(division) = division.filter(|_| own.groups != Groups::NONE) else {
        let sum = others.fold(f64::from(own.sms.0), |sum, other| sum + f64::from(other.sms.0));
        return f64::from(own.sms.0) * (all / sum.max(1.0)).min(1.0);
    };
    let mut loads = vec![1.0; division.count()];
    for other in others {
        let anywhere = if other.groups == Groups::NONE { f64::from(other.sms.0) / all } else { 0.0 };
        for (group, load) in loads.iter_mut().enumerate() {
            *load += if other.groups.contains(group) { 1.0 } else { anywhere };
        }
    }
    let parts = division.sizes().iter().zip(&loads).enumerate();
    let own = parts.filter(|(group, _)| own.groups.contains(*group));
    own.map(|(_, (sms, load))| f64::from(sms.0) / load).sum()
}

impl AsFd for Pool {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.words.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn anywhere(sms: u32) -> Option<Occupied> {
        Some(Occupied::anywhere(Sms(sms)))
    }

    #[test]
    fn what_a_dead_worker_held_comes_back() {
        let pool = Pool::create().unwrap();
        pool.occupy(0, anywhere(40));
        pool.occupy(3, anywhere(100));
        pool.occupy(SEATS, anywhere(7));
        assert_eq!(pool.in_use(), 140);
        let before = pool.generation().load(Ordering::Acquire);
        pool.occupy(3, None);
        assert_eq!(pool.in_use(), 40);
        assert_ne!(pool.generation().load(Ordering::Acquire), before);
    }

    #[test]
    fn percentages_share_the_gpu_in_proportion_where_they_do_not_fit() {
        let of = |own: u32, others: &[u32]| {
            let others = others.iter().map(|&sms| Occupied::anywhere(Sms(sms)));
            effective(Occupied::anywhere(Sms(own)), others, Sms(100), Division::of(Sms(100)).as_ref())
        };
        assert_eq!([of(60, &[]), of(60, &[40]), of(60, &[140]), of(60, &[60])], [60.0, 60.0, 30.0, 50.0]);
    }

    #[test]
    fn partitions_share_what_they_have_in_common_and_nothing_else() {
        let division = Division::of(Sms(80)).unwrap();
        let on = |groups: std::ops::Range<usize>| Occupied::partition(&division, groups.collect());
        let of = |own, others: &[Occupied]| effective(own, others.iter().copied(), Sms(80), Some(&division));
        assert_eq!(of(on(0..5), &[on(5..10)]), 40.0);
        assert_eq!(of(on(0..5), &[on(4..10)]), 36.0);
        assert!((of(on(0..5), &[on(0..5), on(0..1)]) - (16.0 + 8.0 / 3.0)).abs() < 1e-9);
        let whole = Occupied::partition(&division, Groups::WHOLE);
        assert_eq!((whole.sms, of(whole, &[on(0..5)])), (Sms(80), 60.0));
        // Whoever has half of the SMs, wherever they are, slows each group by half of what it would take of all.
        assert!((of(on(0..4), &[Occupied::anywhere(Sms(40))]) - 32.0 / 1.5).abs() < 1e-9);
    }

    #[test]
    fn a_seat_tells_its_groups_to_the_others_and_not_to_itself() {
        let pool = Pool::create().unwrap();
        let division = Division::of(Sms(512)).unwrap();
        let last = Occupied::partition(&division, [63].into_iter().collect());
        pool.occupy(5, Some(last));
        let effective = |seat| pool.effective(seat, last, Sms(512), Some(&division));
        assert_eq!((effective(5), effective(6)), (8.0, 4.0));
    }
}
