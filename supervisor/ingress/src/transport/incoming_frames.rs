//! The repair of HTTP/2 frames that the `h2` crate does not accept, before `h2` reads them. Lengths
//! stay the same.
//!
//! Over Unix sockets, the authorities of calls are repaired ([`super::authority`]).
//!
//! The other repair lets a connection end without harm to streams that its client opens meanwhile.
//! h2 ends a connection gracefully with a GOAWAY that allows every stream, a PING, and, once the
//! client has acknowledged the PING, a GOAWAY with the last stream that it serves. It ignores later
//! streams, as RFC 9113 (6.8) requires, but takes a WINDOW_UPDATE of one for an error of the whole
//! connection, and earlier calls fail. gRPC's C core sends such frames: it may have numbered a
//! stream before it reads the GOAWAY, and writes the acknowledgement before the stream's HEADERS.
//! So these frames get a type that h2 ignores. The client opens the stream again elsewhere once it
//! has read the last GOAWAY, but not if it cannot write before that, so the socket stays open until
//! the client closes it.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

use super::authority::repair_authority;
use super::call_head::MAX_FRAME_BYTES;
use super::calls::NewCalls;

const PREFACE_BYTES: usize = 24;
const HEAD_BYTES: usize = 9;
const PING_BYTES: usize = 8;

/// The size of a read while the beginning of a frame is held, and at the end of a connection.
const READ_BYTES: usize = 1024;

/// The time that a client has to read the end and to close the connection.
const LINGER: Duration = Duration::from_secs(1);

// Frame types and a flag of RFC 9113, section 6.
const HEADERS: u8 = 1;
const PING: u8 = 6;
const WINDOW_UPDATE: u8 = 8;
const ACK: u8 = 1;

/// A frame type without a meaning, which RFC 9113 (5.5) requires every implementation to ignore.
const IGNORED: u8 = 0xff;

/// The payload of the PING that h2 sends after its first GOAWAY. The reply shows that the client has read
/// the GOAWAY.
const SHUTDOWN_PING: [u8; PING_BYTES] = [0x0b, 0x7b, 0xa2, 0xf0, 0x8b, 0x9b, 0xfe, 0x54];

/// A stream whose incoming frames are repaired.
pub(super) struct RepairedStream<S> {
    stream: S,
    /// The calls that must start before more is read.
    new_calls: NewCalls,
    /// The beginning of an incomplete frame, which `h2` cannot use yet.
    held: Vec<u8>,
    /// The number of these bytes that can be passed on.
    free: usize,
    frames: Frames,
    /// The timer that runs once the connection is shut down for writing.
    linger: Option<Pin<Box<Sleep>>>,
}

impl<S> RepairedStream<S> {
    pub(super) fn new(stream: S, new_calls: NewCalls, repairs_authorities: bool) -> Self {
        let frames =
            Frames { skip: PREFACE_BYTES, repairs_authorities, last_stream: 0, has_acknowledged: false };
        Self { stream, new_calls, held: Vec::new(), free: 0, frames, linger: None }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for RepairedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        ready!(self.new_calls.poll_few(cx));
        let Self { stream, held, free, frames, .. } = &mut *self;
        loop {
            if *free > 0 {
                let given = buf.remaining().min(*free);
                buf.put_slice(&held[..given]);
                held.drain(..given);
                *free -= given;
                return Poll::Ready(Ok(()));
            }
            if held.is_empty() {
                let before = buf.filled().len();
                ready!(Pin::new(&mut *stream).poll_read(cx, buf))?;
                let received = &mut buf.filled_mut()[before..];
                let (repaired, at_end) = (frames.repair(received), received.is_empty());
                held.extend_from_slice(&received[repaired..]);
                buf.set_filled(before + repaired);
                if repaired > 0 || at_end {
                    return Poll::Ready(Ok(()));
                }
            } else {
                let mut room = [0; READ_BYTES];
                let mut received = ReadBuf::new(&mut room);
                ready!(Pin::new(&mut *stream).poll_read(cx, &mut received))?;
                held.extend_from_slice(received.filled());
                *free = if received.filled().is_empty() { held.len() } else { frames.repair(held) };
            }
        }
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for RepairedStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Self { stream, linger, .. } = &mut *self;
        if linger.is_none() {
            ready!(Pin::new(&mut *stream).poll_shutdown(cx))?;
        }
        let linger = linger.get_or_insert_with(|| Box::pin(sleep(LINGER)));
        while linger.as_mut().poll(cx).is_pending() {
            let mut bytes = [0; READ_BYTES];
            let mut unread = ReadBuf::new(&mut bytes);
            let read = ready!(Pin::new(&mut *stream).poll_read(cx, &mut unread));
            if read.is_err() || unread.filled().is_empty() {
                break;
            }
        }
        Poll::Ready(Ok(()))
    }
}

/// The place in a stream of frames.
struct Frames {
    /// The number of bytes before the head of the next frame.
    skip: usize,
    repairs_authorities: bool,
    last_stream: u32,
    /// True if the client has acknowledged the end, so that h2 ignores later streams.
    has_acknowledged: bool,
}

impl Frames {
    /// Repairs the complete frames in `bytes`, which begin `skip` bytes before the head of a frame.
    /// Returns the number of bytes that can be passed on.
    fn repair(&mut self, bytes: &mut [u8]) -> usize {
        let mut done = 0;
        loop {
            let skipped = (bytes.len() - done).min(self.skip);
            done += skipped;
            self.skip -= skipped;
            let Some((head, rest)) = bytes[done..].split_first_chunk_mut::<HEAD_BYTES>() else { return done };
            let [high, middle, low, kind, flags, stream @ ..] = head;
            let length = usize::from(*high) << 16 | usize::from(*middle) << 8 | usize::from(*low);
            let stream = u32::from_be_bytes(*stream);
            match *kind {
                // Longer frames are not held, because h2 refuses them.
                HEADERS if self.repairs_authorities && length <= MAX_FRAME_BYTES as usize => {
                    let Some(payload) = rest.get_mut(..length) else { return done };
                    repair_authority(payload, *flags);
                }
                PING if *flags & ACK != 0 && length == PING_BYTES => {
                    let Some(payload) = rest.get(..PING_BYTES) else { return done };
                    self.has_acknowledged |= *payload == SHUTDOWN_PING;
                }
                WINDOW_UPDATE if self.has_acknowledged && stream > self.last_stream => *kind = IGNORED,
                _ => {}
            }
            if *kind == HEADERS && !self.has_acknowledged {
                self.last_stream = self.last_stream.max(stream);
            }
            self.skip = HEAD_BYTES + length;
        }
    }
}

#[cfg(test)]
#[path = "incoming_frames_tests.rs"]
mod tests;
