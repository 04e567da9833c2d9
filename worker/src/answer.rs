//! The slots of the response slab. The answers of batches are written to these slots part by part.

use std::ptr::NonNull;
use std::sync::Arc;

use shadowslice_shared::batch::{Extent, RunFailure};
use shadowslice_shared::pause::PauseWord;
use shadowslice_shared::slab::{ALIGNMENT, AnswerWriter};

/// The response slab, which is divided into slots of equal size.
#[derive(Debug)]
pub struct AnswerSlots {
    writer: AnswerWriter,
    slot_bytes: u64,
}

impl AnswerSlots {
    pub fn new(writer: AnswerWriter, slot_bytes: u64) -> Self {
        Self { writer, slot_bytes }
    }

    /// Returns the word with which the supervisor pauses the worker's batches.
    pub fn pause_word(&self) -> &Arc<PauseWord> {
        self.writer.pause_word()
    }

    pub fn slot(&self, slot: u8) -> AnswerSlot<'_> {
        let start = u64::from(slot) * self.slot_bytes;
        AnswerSlot { writer: &self.writer, start, end: start, limit: start + self.slot_bytes }
    }
}

/// A slot of the response slab. If an answer does not fit, the slot continues to count the answer's
/// bytes, so that the error can state the required size.
#[derive(Debug)]
pub struct AnswerSlot<'a> {
    writer: &'a AnswerWriter,
    start: u64,
    end: u64,
    limit: u64,
}

impl AnswerSlot<'_> {
    pub fn put(&mut self, bytes: &[u8]) -> Extent {
        let (extent, place) = self.reserve(bytes.len() as u64);
        if place.is_some() {
            self.writer.write(extent.offset, bytes).expect("`reserve` found room");
        }
        extent
    }

    /// Reserves space for one request's part of one output. A device later writes the bytes.
    /// Returns the part's extent, and the part's address if the part fits.
    pub fn reserve(&mut self, len: u64) -> (Extent, Option<NonNull<u8>>) {
        let offset = self.end.next_multiple_of(ALIGNMENT);
        self.end = offset.saturating_add(len);
        let fits = self.end <= self.limit;
        let place =
            || self.writer.place(offset, len).expect("every slot lies inside the slab that was mapped");
        (Extent { offset, len }, fits.then(place))
    }

    /// Writes the outputs of one stream with `put`. If they do not fit, frees their room again, so that
    /// only this stream fails.
    pub fn put_stream<T>(&mut self, put: impl FnOnce(&mut Self) -> T) -> Result<T, RunFailure> {
        let end = self.end;
        let written = put(self);
        self.check().map(|()| written).inspect_err(|_| self.end = end)
    }

    pub fn check(&self) -> Result<(), RunFailure> {
        let (needed, room) = (self.end - self.start, self.limit - self.start);
        if needed > room { Err(RunFailure::AnswerTooLarge { needed, room }) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowslice_shared::slab::AnswerSlab;
    use std::os::fd::AsFd;

    #[test]
    fn parts_are_aligned_and_stay_in_their_slot() {
        let slab = AnswerSlab::create("test", 512).unwrap();
        let slots = AnswerSlots::new(AnswerWriter::map(slab.as_fd(), 512).unwrap(), 256);
        let mut slot = slots.slot(1);
        assert_eq!(slot.put(b"first"), Extent { offset: 256, len: 5 });
        let second = slot.put(b"second");
        assert_eq!(second, Extent { offset: 320, len: 6 });
        assert_eq!(slot.check(), Ok(()));
        assert_eq!(slab.copy(second.offset, second.len).unwrap(), b"second");
    }

    #[test]
    fn a_stream_whose_answer_does_not_fit_leaves_its_room_to_others() {
        let slab = AnswerSlab::create("test", 128).unwrap();
        let slots = AnswerSlots::new(AnswerWriter::map(slab.as_fd(), 128).unwrap(), 128);
        let mut slot = slots.slot(0);
        assert_eq!(slot.put_stream(|slot| slot.put(b"one")), Ok(Extent { offset: 0, len: 3 }));
        let too_large = slot.put_stream(|slot| slot.put(&[1; 100]));
        assert_eq!(too_large, Err(RunFailure::AnswerTooLarge { needed: 164, room: 128 }));
        assert_eq!(slot.put_stream(|slot| slot.put(b"two")), Ok(Extent { offset: 64, len: 3 }));
    }

    #[test]
    fn an_answer_that_does_not_fit_is_counted_and_not_written() {
        let slab = AnswerSlab::create("test", 256).unwrap();
        let slots = AnswerSlots::new(AnswerWriter::map(slab.as_fd(), 256).unwrap(), 128);
        let mut slot = slots.slot(0);
        slot.put(&[1; 100]);
        slot.put(&[2; 200]);
        assert_eq!(slot.check(), Err(RunFailure::AnswerTooLarge { needed: 328, room: 128 }));
        assert_eq!(slab.copy(128, 128).unwrap(), [0; 128], "the next slot is untouched");
    }
}
