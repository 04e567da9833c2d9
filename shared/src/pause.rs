//! Pauses: between two pieces of a batch, the GPU waits while another model's batch needs its SMs.
//!
//! A worker cuts a long batch into *pieces*, and submits all of them at once. Before each piece, the GPU
//! reads the worker's [`PauseWord`] and waits while the word is not zero. The supervisor writes the word. The
//! worker clears a word that has not changed for [`MAX_BATCH_PAUSE`]. It looks once in this time, so a supervisor
//! that exits or hangs pauses a batch for at most twice as long.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::slab::{Mapping, SlabError};
use rustix::thread::futex;

/// The time after which a pause ends, although the urgent batch has not ended. Batches for which others wait
/// take at most a few milliseconds.
pub const MAX_BATCH_PAUSE: Duration = Duration::from_millis(10);

/// The longest piece that a worker aims for. Batches of 1 to 8 ms in two to eight such pieces took at most
/// 1.4 % longer (measured on an H200).
pub const PIECE: Duration = Duration::from_millis(1);

/// The maximum number of pieces of a batch. With 16 pieces, small batches took up to 8 % longer (measured
/// on an H200).
pub const MAX_PIECES: u32 = 8;

/// The size of a pause word's memory in bytes: one page, so that the GPU's driver can register it alone.
pub const PAUSE_BYTES: u64 = 4096;

/// The value of a word that pauses no batch.
const FREE: u32 = 0;

/// Returns the number of pieces of a batch that takes this time alone: a power of two.
pub fn pieces(batch: Duration) -> u32 {
    let whole = batch.as_micros().div_ceil(PIECE.as_micros().max(1));
    u32::try_from(whole).unwrap_or(MAX_PIECES).clamp(1, MAX_PIECES).next_power_of_two()
}

/// The word of a worker that the supervisor writes, and that the GPU reads before each piece.
#[derive(Debug)]
pub struct PauseWord(Mapping);

impl PauseWord {
    /// Maps the word at the end of a response slab, after its `slab_bytes` bytes.
    pub(crate) fn map(slab: BorrowedFd<'_>, slab_bytes: u64) -> Result<Self, SlabError> {
        Mapping::writable_at(slab, Self::offset(slab_bytes), PAUSE_BYTES).map(Self)
    }

    /// Returns the offset of the word in the file of a slab with this size.
    pub(crate) fn offset(slab_bytes: u64) -> u64 {
        slab_bytes.next_multiple_of(PAUSE_BYTES)
    }

    /// Pauses the worker's batch at its next piece. Each pause has another `number`, which is not zero.
    pub fn pause(&self, number: u32) {
        self.word().store(number.max(FREE + 1), Ordering::Release);
    }

    /// Lets the worker's batch continue.
    pub fn release(&self) {
        self.word().store(FREE, Ordering::Release);
        // Only an emulated GPU waits so. The call cannot fail on a mapped word.
        let _woken = futex::wake(self.word(), futex::Flags::empty(), 1);
    }

    /// Ends the pause with this number, unless it has already ended. Returns whether this call ended it.
    pub fn expire(&self, number: u32) -> bool {
        self.word().compare_exchange(number, FREE, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    /// Returns the number of the current pause, or `None` if the batch may continue.
    pub fn current(&self) -> Option<u32> {
        Some(self.word().load(Ordering::Acquire)).filter(|&number| number != FREE)
    }

    /// Returns the word, whose value is zero if the batch may continue.
    pub fn word(&self) -> &AtomicU32 {
        self.0.word()
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::slab::{AnswerSlab, AnswerWriter};

    #[test]
    fn long_batches_have_pieces_of_at_most_a_millisecond_up_to_the_maximum() {
        let at = |us| pieces(Duration::from_micros(us));
        assert_eq!([0, 1, 1_000, 1_001, 2_500, 5_000, 8_500, 90_000].map(at), [1, 1, 1, 2, 4, 8, 8, 8]);
        assert_eq!(pieces(Duration::MAX), MAX_PIECES);
    }

    #[test]
    fn the_worker_sees_a_pause_and_ends_only_the_one_that_it_has_seen() {
        let slab = AnswerSlab::create("test", 100).unwrap();
        let writer = AnswerWriter::map(slab.as_fd(), 100).unwrap();
        let (ours, theirs) = (slab.pause_word(), writer.pause_word());
        assert_eq!(theirs.current(), None);
        ours.pause(7);
        assert_eq!(theirs.current(), Some(7));
        ours.pause(8);
        assert!(!theirs.expire(7));
        assert_eq!(theirs.current(), Some(8));
        assert!(theirs.expire(8));
        assert_eq!(ours.current(), None);
        ours.pause(0);
        assert_eq!(theirs.current(), Some(1), "zero would not pause");
        ours.release();
        assert_eq!(theirs.current(), None);
        writer.write(0, &[1; 100]).unwrap();
        assert_eq!(theirs.current(), None, "answers do not reach the word");
    }
}
