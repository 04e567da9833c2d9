//! Bytes on their way to a client, with a guard that is notified when they have been written.
//!
//! After each write, hyper and h2 advance a buffer by the bytes that the socket accepted. So the
//! last byte has been written when the buffer reaches its end. h2 first copies a frame of less than
//! 256 bytes, and then the buffer reaches its end with the copy.

use std::io::IoSlice;
use std::sync::Arc;

use bytes::Buf;
use tokio::sync::oneshot;

use super::slow_reader::UnsentPiece;
use crate::admission::{Deliveries, MemoryPermit};
use shadowslice_datapath::access::AccessEntry;

/// The things that bytes keep until they have been written, and that then learn of it.
#[derive(Debug, Default)]
pub(super) struct BodyGuard {
    pub(super) _permit: Option<Arc<MemoryPermit>>,
    /// The deliveries of the answers that end with the bytes.
    pub(super) deliveries: Deliveries,
    /// The access log's entry, which counts the bytes.
    pub(super) entry: Option<AccessEntry>,
    pub(super) _unsent: Option<UnsentPiece>,
    /// A sender that is dropped with the bytes.
    pub(super) _written_tx: Option<oneshot::Sender<()>>,
}

#[derive(Debug)]
pub(crate) struct GuardedBody<B> {
    bytes: B,
    guard: BodyGuard,
}

impl<B> GuardedBody<B> {
    pub(super) fn new(bytes: B, guard: BodyGuard) -> Self {
        Self { bytes, guard }
    }
}

impl<B: Buf> Buf for GuardedBody<B> {
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
        if let Some(entry) = &self.guard.entry {
            entry.add_sent(count);
        }
        if !self.bytes.has_remaining() {
            self.guard.deliveries.mark_written();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr};
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
    use std::time::Instant;

    use shadowslice_datapath::access::{AccessLog, AccessProtocol, RequestHead};
    use shadowslice_datapath::peer::Peer;

    use super::*;

    #[test]
    fn only_the_last_byte_delivers_the_answer() {
        let peer = Peer::Tcp { address: SocketAddr::from((Ipv4Addr::LOCALHOST, 1)), names: Vec::new() };
        let head = RequestHead { protocol: AccessProtocol::Http, method: "GET", path: "/", request_id: None };
        for (written, is_delivered) in [(5, false), (6, true)] {
            let is_logged = Arc::new(AtomicBool::new(false));
            let seen = Arc::clone(&is_logged);
            let log = Arc::new(AccessLog::new(move |record| {
                assert_eq!((record.bytes_out, record.reason.is_none()), (written as u64, is_delivered));
                seen.store(true, Relaxed);
            }));
            let entry = log.begin(head, &Arc::new(peer.clone()), Instant::now());
            entry.set_code(200);
            let deliveries = entry.clone().into();
            let guard = BodyGuard { deliveries, entry: Some(entry), ..BodyGuard::default() };
            GuardedBody::new(&b"answer"[..], guard).advance(written);
            assert!(is_logged.load(Relaxed));
        }
    }
}
