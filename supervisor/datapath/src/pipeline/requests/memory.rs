//! The memory of waiting requests: the request slab, its free parts, and the parts that requests
//! have reserved.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use shadowslice_shared::batch::Extent;
use shadowslice_shared::slab::{ALIGNMENT, OutOfSlab, SlabError, WritableSlab};

use super::pieces::Pieces;

/// Returns the number of bytes that a tensor of this length takes in the slab, including padding.
pub(crate) fn taken(len: u64) -> u64 {
    len.checked_next_multiple_of(ALIGNMENT).unwrap_or(u64::MAX)
}

/// The request slab and its free parts.
#[derive(Debug)]
pub(crate) struct RequestMemory {
    pub(crate) slab: WritableSlab,
    free: Mutex<FreeParts>,
}

impl RequestMemory {
    pub(crate) fn create(model: &str, bytes: u64) -> Result<Self, SlabError> {
        let slab = WritableSlab::create(&format!("shadowslice-{model}-requests"), bytes)?;
        Ok(Self { slab, free: Mutex::new(FreeParts::new(bytes)) })
    }

    /// Reserves aligned memory for tensors of these lengths. Returns `None` if no free part is
    /// large enough.
    pub(crate) fn reserve(self: &Arc<Self>, lengths: impl Iterator<Item = u64>) -> Option<Reservation> {
        let mut tensors = Vec::new();
        let mut end = 0_u64;
        for len in lengths {
            tensors.push(Extent { offset: end, len });
            end = end.checked_add(taken(len))?;
        }
        let len = end.max(ALIGNMENT);
        let offset = self.free.lock().take(len)?;
        for tensor in &mut tensors {
            tensor.offset += offset;
        }
        Some(Reservation { memory: Arc::clone(self), part: Extent { offset, len }, tensors })
    }
}

/// The part of the slab that one request has reserved. Dropping this value frees the part.
#[derive(Debug)]
pub(crate) struct Reservation {
    memory: Arc<RequestMemory>,
    part: Extent,
    pub(crate) tensors: Vec<Extent>,
}

impl Reservation {
    /// Returns the size of the reserved memory in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.part.len
    }

    /// Writes a tensor. The data must have the length that was reserved.
    pub(crate) fn fill(&self, index: usize, data: &Pieces) -> Result<(), OutOfSlab> {
        let mut offset = self.tensors[index].offset;
        for piece in data.iter() {
            self.memory.slab.write(offset, piece)?;
            offset += piece.len() as u64;
        }
        Ok(())
    }

    /// Returns whether the reserved memory contains exactly these tensors.
    pub(crate) fn holds(&self, tensors: &[Vec<u8>]) -> bool {
        let same = |(place, bytes): (&Extent, &Vec<u8>)| {
            place.len == bytes.len() as u64 && self.memory.slab.holds(place.offset, bytes)
        };
        self.tensors.len() == tensors.len() && self.tensors.iter().zip(tensors).all(same)
    }

    /// Copies the tensors out of the slab.
    pub(crate) fn copy(&self) -> Option<Vec<Vec<u8>>> {
        self.tensors.iter().map(|place| self.memory.slab.copy(place.offset, place.len).ok()).collect()
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.memory.free.lock().give_back(self.part);
    }
}

/// The free parts, sorted by offset. First-fit allocation reuses the pages at low offsets, so that
/// a light load does not touch the other pages.
#[derive(Debug)]
struct FreeParts(BTreeMap<u64, u64>);

impl FreeParts {
    fn new(bytes: u64) -> Self {
        Self(BTreeMap::from([(0, bytes)]))
    }

    fn take(&mut self, wanted: u64) -> Option<u64> {
        let (&offset, &len) = self.0.iter().find(|&(_, &len)| len >= wanted)?;
        self.0.remove(&offset);
        if len > wanted {
            self.0.insert(offset + wanted, len - wanted);
        }
        Some(offset)
    }

    fn give_back(&mut self, part: Extent) {
        let Extent { mut offset, mut len } = part;
        if let Some((&before, &before_len)) = self.0.range(..offset).next_back()
            && before + before_len == offset
        {
            offset = before;
            len += before_len;
        }
        if let Some(after_len) = self.0.remove(&(part.offset + part.len)) {
            len += after_len;
        }
        self.0.insert(offset, len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_disjoint_aligned_and_reusable() {
        let memory = Arc::new(RequestMemory::create("test", 64 * 10).unwrap());
        let first = memory.reserve([1, 65].into_iter()).unwrap();
        assert_eq!(first.tensors, [Extent { offset: 0, len: 1 }, Extent { offset: 64, len: 65 }]);
        let second = memory.reserve([64 * 7].into_iter()).unwrap();
        assert_eq!(second.tensors[0].offset, 192);
        assert!(memory.reserve([1].into_iter()).is_none(), "full");
        drop(first);
        assert!(memory.reserve([193].into_iter()).is_none(), "three separate pieces are free");
        assert_eq!(memory.reserve([192].into_iter()).unwrap().tensors[0].offset, 0);
        drop(second);
        assert_eq!(memory.free.lock().0, BTreeMap::from([(0, 640)]), "one piece again");
    }

    #[test]
    fn absurd_lengths_are_refused() {
        let memory = Arc::new(RequestMemory::create("test", 4096).unwrap());
        assert!(memory.reserve([u64::MAX, u64::MAX].into_iter()).is_none());
        assert!(memory.reserve([0].into_iter()).is_some());
    }
}
