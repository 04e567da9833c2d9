//! Bytes on their way to a client, with what is let go of when they have been written.
//!
//! After each write, hyper and h2 advance a buffer by the bytes that the socket took. So the last
//! byte is written when the buffer reaches its end. h2 copies a frame of less than 256 bytes first,
//! and then the copy is the end.

use std::io::IoSlice;

use bytes::Buf;

/// A companion of bytes on their way.
pub(crate) trait Goes {
    /// Hears that the socket took some bytes.
    fn advanced(&mut self, _bytes: usize) {}

    /// Hears that the last byte has been written, perhaps more than once.
    fn written(&mut self);
}

#[derive(Debug)]
pub(crate) struct Kept<B, W> {
    bytes: B,
    with: W,
}

impl<B, W> Kept<B, W> {
    pub(crate) fn new(bytes: B, with: W) -> Self {
        Self { bytes, with }
    }
}

impl<B: Buf, W: Goes> Buf for Kept<B, W> {
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
        self.with.advanced(count);
        if !self.bytes.has_remaining() {
            self.with.written();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Times(u32);

    impl Goes for &mut Times {
        fn written(&mut self) {
            self.0 += 1;
        }
    }

    #[test]
    fn the_last_byte_says_that_it_was_written_and_no_other() {
        let mut times = Times::default();
        let mut bytes = Kept::new(&b"answer"[..], &mut times);
        bytes.advance(5);
        assert_eq!(bytes.with.0, 0);
        bytes.advance(1);
        assert_eq!(times.0, 1);
    }
}
