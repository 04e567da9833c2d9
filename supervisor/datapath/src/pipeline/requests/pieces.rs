//! Bytes in several pieces, in the form in which they were received or will be sent. This avoids a
//! copy into one contiguous buffer.

use std::collections::VecDeque;
use std::io::IoSlice;

use bytes::{Buf, Bytes, BytesMut};

/// Bytes in one or more pieces.
#[derive(Debug, Clone, Default)]
pub struct Pieces {
    /// The first piece. It is stored separately because there is usually only one piece, which then
    /// needs no allocation. It is empty only if all pieces are empty.
    first: Bytes,
    /// The other pieces. Each has at least one byte.
    rest: VecDeque<Bytes>,
    len: usize,
}

impl Pieces {
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn push(&mut self, piece: Bytes) {
        self.len += piece.len();
        if self.first.is_empty() {
            self.first = piece;
        } else if !piece.is_empty() {
            self.rest.push_back(piece);
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = &Bytes> {
        std::iter::once(&self.first).chain(&self.rest)
    }

    /// Splits off the first `len` bytes, or all bytes if there are fewer.
    #[must_use]
    pub fn split_to(&mut self, len: usize) -> Self {
        let mut taken = Self::default();
        while taken.len < len && !self.is_empty() {
            let part = self.first.split_to(self.first.len().min(len - taken.len));
            self.len -= part.len();
            self.advance_piece();
            taken.push(part);
        }
        taken
    }

    /// Returns the bytes if there is only one piece. Otherwise returns the pieces unchanged.
    pub fn into_one(self) -> Result<Bytes, Self> {
        if self.rest.is_empty() { Ok(self.first) } else { Err(self) }
    }

    /// Returns all bytes in one piece. If there are several pieces, this copies them, so use it
    /// only for small amounts of data.
    pub fn into_bytes(self) -> Bytes {
        self.into_one().unwrap_or_else(|pieces| {
            let mut whole = BytesMut::with_capacity(pieces.len);
            pieces.iter().for_each(|piece| whole.extend_from_slice(piece));
            whole.freeze()
        })
    }

    /// Moves to the next piece if the first piece is empty.
    fn advance_piece(&mut self) {
        if self.first.is_empty() {
            self.first = self.rest.pop_front().unwrap_or_default();
        }
    }
}

impl From<Bytes> for Pieces {
    fn from(piece: Bytes) -> Self {
        Self { len: piece.len(), first: piece, rest: VecDeque::new() }
    }
}

impl From<Vec<u8>> for Pieces {
    fn from(piece: Vec<u8>) -> Self {
        Bytes::from(piece).into()
    }
}

impl From<String> for Pieces {
    fn from(piece: String) -> Self {
        Bytes::from(piece).into()
    }
}

/// Compares the bytes, regardless of how they are split into pieces.
impl PartialEq for Pieces {
    fn eq(&self, other: &Self) -> bool {
        self.len == other.len && self.iter().flatten().eq(other.iter().flatten())
    }
}

impl Eq for Pieces {}

/// Provides all pieces for vectored writes, which need few system calls.
impl Buf for Pieces {
    fn remaining(&self) -> usize {
        self.len
    }

    fn chunk(&self) -> &[u8] {
        &self.first
    }

    fn chunks_vectored<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        let pieces = self.iter().filter(|piece| !piece.is_empty());
        slices.iter_mut().zip(pieces).map(|(slice, piece)| *slice = IoSlice::new(piece)).count()
    }

    fn advance(&mut self, count: usize) {
        assert!(count <= self.len, "cannot advance by {count} of {} bytes", self.len);
        drop(self.split_to(count));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pieces(cut: &[Vec<u8>]) -> Pieces {
        let mut pieces = Pieces::default();
        cut.iter().for_each(|piece| pieces.push(piece.clone().into()));
        pieces
    }

    #[test]
    fn one_piece_is_not_copied() {
        let whole = Bytes::from(vec![1, 2, 3]);
        let at = whole.as_ptr();
        let mut pieces = Pieces::from(whole);
        let first = pieces.split_to(2).into_bytes();
        assert_eq!((first.as_ptr(), &first[..]), (at, &[1, 2][..]));
        assert_eq!(pieces.into_bytes(), [3][..]);
        assert!(Pieces::default().split_to(1).is_empty());
    }

    proptest! {
        #[test]
        fn the_bytes_do_not_depend_on_how_they_are_split(
            cut in prop::collection::vec(prop::collection::vec(0..4_u8, 0..5), 0..6),
            at in 0..30_usize,
        ) {
            let whole = cut.concat();
            let at = at.min(whole.len());
            let mut rest = pieces(&cut);
            prop_assert_eq!(&rest, &Pieces::from(whole.clone()));
            let taken = rest.split_to(at);
            prop_assert_eq!((taken.len(), rest.len()), (at, whole.len() - at));
            prop_assert_eq!(&taken.clone().into_bytes()[..], &whole[..at]);
            prop_assert_eq!(&rest.clone().into_bytes()[..], &whole[at..]);
            prop_assert_eq!(taken.is_empty(), at == 0);

            let mut slices = [IoSlice::new(&[]); 8];
            let written: Vec<u8> = {
                let count = rest.chunks_vectored(&mut slices);
                slices[..count].iter().flat_map(|slice| slice.to_vec()).collect()
            };
            prop_assert_eq!(&written[..], &whole[at..]);
            prop_assert_eq!(rest.chunk().is_empty(), rest.remaining() == 0);
            rest.advance(rest.remaining());
            prop_assert!(rest.is_empty() && rest.rest.is_empty());
        }
    }
}
