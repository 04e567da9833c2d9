//! The blocks of an arena: which of its bytes are free.

use std::collections::BTreeMap;
use std::ops::Range;

/// The alignment of blocks in bytes. It is the same as for CUDA's own allocations.
const ALIGNMENT: usize = 256;

/// The free and the used blocks of an arena that can grow at its end. Offsets and sizes are in bytes.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    /// The sizes of the free blocks by their offsets. No two of them touch.
    free: BTreeMap<usize, usize>,
    /// The used blocks by their offsets.
    used: BTreeMap<usize, UsedBlock>,
    size: usize,
}

#[derive(Debug, Clone, Copy)]
struct UsedBlock {
    size: usize,
    is_loaded: bool,
}

impl Blocks {
    /// Takes a part of the smallest free block that is large enough, and returns its offset. If there is
    /// none, returns the number of bytes to add at the end of the arena. `is_loaded` tells whether the
    /// block is for data that comes with the model.
    pub(super) fn take(&mut self, bytes: usize, is_loaded: bool) -> Result<usize, usize> {
        let bytes = bytes.max(1).next_multiple_of(ALIGNMENT);
        let fitting = self.free.iter().filter(|(_, size)| **size >= bytes);
        let Some((&offset, &size)) = fitting.min_by_key(|(_, size)| **size) else {
            let last = self.free.last_key_value().filter(|(offset, size)| *offset + *size == self.size);
            return Err(bytes - last.map_or(0, |(_, size)| *size));
        };
        self.free.remove(&offset);
        if size > bytes {
            self.free.insert(offset + bytes, size - bytes);
        }
        self.used.insert(offset, UsedBlock { size: bytes, is_loaded });
        Ok(offset)
    }

    /// Frees the block at this offset. Returns false if no block begins there.
    pub(super) fn give_back(&mut self, offset: usize) -> bool {
        let Some(block) = self.used.remove(&offset) else { return false };
        self.insert_free(offset, block.size);
        true
    }

    /// Returns the used blocks for data that comes with the model.
    pub(super) fn loaded(&self) -> impl Iterator<Item = Range<usize>> {
        let loaded = self.used.iter().filter(|(_, block)| block.is_loaded);
        loaded.map(|(&offset, block)| offset..offset + block.size)
    }

    /// Adds free bytes at the end.
    pub(super) fn grow(&mut self, bytes: usize) {
        let offset = self.size;
        self.size += bytes;
        self.insert_free(offset, bytes);
    }

    /// Removes this number of bytes at the end. Returns false if one of them is used.
    pub(super) fn shrink(&mut self, bytes: usize) -> bool {
        let Some((&offset, &size)) = self.free.last_key_value() else { return false };
        if offset + size != self.size || size < bytes {
            return false;
        }
        self.size -= bytes;
        match size - bytes {
            0 => self.free.remove(&offset),
            left => self.free.insert(offset, left),
        };
        true
    }

    fn insert_free(&mut self, mut offset: usize, mut size: usize) {
        if let Some((&before, &length)) = self.free.range(..offset).next_back()
            && before + length == offset
        {
            self.free.remove(&before);
            (offset, size) = (before, size + length);
        }
        if let Some(length) = self.free.remove(&(offset + size)) {
            size += length;
        }
        self.free.insert(offset, size);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(size: usize) -> Blocks {
        let mut blocks = Blocks::default();
        blocks.grow(size);
        blocks
    }

    #[test]
    fn the_smallest_block_that_fits_is_used_and_neighbours_merge() {
        let mut blocks = blocks(10 * ALIGNMENT);
        let offsets: Vec<_> = [2, 1, 3, 1].map(|count| blocks.take(count * ALIGNMENT, false).unwrap()).into();
        assert_eq!(offsets, [0, 2, 3, 6].map(|count| count * ALIGNMENT));
        assert!(blocks.give_back(offsets[0]) && blocks.give_back(offsets[2]));
        assert!(!blocks.give_back(offsets[0]), "it is free already");
        assert_eq!(blocks.take(1, false), Ok(0), "the first of the smallest");
        assert_eq!(blocks.take(3 * ALIGNMENT, false), Ok(offsets[2]));
        for offset in [0, offsets[1], offsets[2], offsets[3]] {
            assert!(blocks.give_back(offset));
        }
        assert_eq!(blocks.free, BTreeMap::from([(0, 10 * ALIGNMENT)]));
    }

    #[test]
    fn only_free_bytes_at_the_end_are_removed() {
        let mut blocks = blocks(4 * ALIGNMENT);
        assert_eq!(blocks.take(ALIGNMENT, false), Ok(0));
        assert_eq!(blocks.take(ALIGNMENT, false), Ok(ALIGNMENT));
        assert!(blocks.give_back(0));
        assert!(!blocks.shrink(3 * ALIGNMENT));
        assert!(blocks.shrink(2 * ALIGNMENT));
        assert!(!blocks.shrink(ALIGNMENT), "the second block is used");
        assert!(blocks.give_back(ALIGNMENT));
        assert!(blocks.shrink(ALIGNMENT) && blocks.shrink(ALIGNMENT));
        assert_eq!((blocks.size, blocks.free.len(), blocks.used.len()), (0, 0, 0));
        assert!(!blocks.shrink(1));
    }

    #[test]
    fn a_full_arena_grows_only_by_what_is_missing_at_its_end() {
        let mut blocks = blocks(4 * ALIGNMENT);
        assert_eq!(blocks.take(3 * ALIGNMENT, false), Ok(0));
        assert_eq!(blocks.take(2 * ALIGNMENT - 7, false), Err(ALIGNMENT));
        blocks.grow(ALIGNMENT);
        assert_eq!(blocks.take(2 * ALIGNMENT - 7, false), Ok(3 * ALIGNMENT));
        assert_eq!(blocks.take(0, false), Err(ALIGNMENT));
        assert!(blocks.give_back(0));
        assert_eq!(blocks.take(4 * ALIGNMENT, false), Err(4 * ALIGNMENT), "a hole does not help");
    }

    #[test]
    fn only_used_blocks_with_data_of_the_model_are_loaded() {
        let mut blocks = blocks(4 * ALIGNMENT);
        let offsets: Vec<_> =
            [true, false, true].map(|is_loaded| blocks.take(ALIGNMENT, is_loaded).unwrap()).into();
        assert!(blocks.give_back(offsets[0]));
        let loaded: Vec<_> = blocks.loaded().map(|block| (block.start, block.len())).collect();
        assert_eq!(loaded, [(2 * ALIGNMENT, ALIGNMENT)]);
        assert_eq!(blocks.take(ALIGNMENT, false), Ok(0));
        assert_eq!(blocks.loaded().count(), 1);
    }
}
