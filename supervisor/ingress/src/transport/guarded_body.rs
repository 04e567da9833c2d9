//! Bytes on their way to a client, with a guard that is notified when they have been written.
//!
//! After each write, hyper and h2 advance a buffer by the bytes that the socket accepted. So the
//! last byte has been written when the buffer reaches its end. h2 first copies a frame of less than
//! 256 bytes, and then the buffer reaches its end with the copy.

use std::io::IoSlice;

use bytes::Buf;

/// A guard that follows bytes on their way.
pub(crate) trait BodyGuard {
    /// Records that the socket has accepted some bytes.
    fn advance(&mut self, _bytes: usize) {}

    /// Records that the last byte has been written. This may be called more than once.
    fn finish(&mut self);
}

#[derive(Debug)]
pub(crate) struct GuardedBody<B, G> {
    bytes: B,
    guard: G,
}

impl<B, G> GuardedBody<B, G> {
    pub(super) fn new(bytes: B, guard: G) -> Self {
        Self { bytes, guard }
    }
}

impl<B: Buf, G: BodyGuard> Buf for GuardedBody<B, G> {
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
        self.guard.advance(count);
        if !self.bytes.has_remaining() {
            self.guard.finish();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Times(u32);

    impl BodyGuard for &mut Times {
        fn finish(&mut self) {
            self.0 += 1;
        }
    }

    #[test]
    fn only_the_last_byte_finishes_the_body() {
        let mut times = Times::default();
        let mut bytes = GuardedBody::new(&b"answer"[..], &mut times);
        bytes.advance(5);
        assert_eq!(bytes.guard.0, 0);
        bytes.advance(1);
        assert_eq!(times.0, 1);
    }
}
