//! Bytes on their way to a client, with what is let go of when they have been written.

use std::io::IoSlice;

use bytes::Buf;

#[derive(Debug)]
pub(super) struct Kept<B, W> {
    bytes: B,
    _with: W,
}

impl<B, W> Kept<B, W> {
    pub(super) fn new(bytes: B, with: W) -> Self {
        Self { bytes, _with: with }
    }
}

impl<B: Buf, W> Buf for Kept<B, W> {
    fn remaining(&self) -> usize {
        self.bytes.remaining()
    }

    fn chunk(&self) -> &[u8] {
        self.bytes.chunk()
    }

    fn chunks_vectored<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        self.bytes.chunks_vectored(slices)
    }

    fn advance(&mut self, count: usize) {
        self.bytes.advance(count);
    }
}
