//! The end of an HTTP/2 connection without harm to streams that its client opens meanwhile.
//!
//! h2 ends a connection gracefully with a GOAWAY that allows every stream, a PING, and, once the
//! client has acknowledged the PING, a GOAWAY with the last stream that it serves. It ignores later
//! streams, as RFC 9113 (6.8) requires, but takes a WINDOW_UPDATE of one for an error of the whole
//! connection, and earlier calls fail. gRPC's C core sends such frames: it may have numbered a
//! stream before it reads the GOAWAY, and writes the acknowledgement before the stream's HEADERS.
//! So these frames are dropped. The client opens the stream again elsewhere once it has read the
//! last GOAWAY, but not if it cannot write before that, so the socket stays open until the client
//! closes it.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

use super::stream_filter::StreamFilter;

const PREFACE_BYTES: usize = 24;
const HEADER_BYTES: usize = 9;
const PING_BYTES: usize = 8;

/// The bytes that one read takes at most while the connection ends.
const READ_BYTES: usize = 8 << 10;

/// The time that a client has to read the end and to close the connection.
const LINGER: Duration = Duration::from_secs(1);

// Frame types and a flag of RFC 9113, section 6.
const HEADERS: u8 = 1;
const PING: u8 = 6;
const WINDOW_UPDATE: u8 = 8;
const ACK: u8 = 1;

/// The payload of the PING by which h2 learns that the client has read its first GOAWAY.
const SHUTDOWN_PING: [u8; PING_BYTES] = [0x0b, 0x7b, 0xa2, 0xf0, 0x8b, 0x9b, 0xfe, 0x54];

/// A connection's incoming bytes. `ending` is set when the graceful shutdown begins.
pub(super) struct LateStreams<F> {
    filter: F,
    ending: Arc<AtomicBool>,
    frames: Frames,
    /// Bytes that are read and not yet delivered, from `delivered` on.
    passed: Vec<u8>,
    delivered: usize,
    /// Runs once the connection is shut down for writing.
    linger: Option<Pin<Box<Sleep>>>,
}

impl<F> LateStreams<F> {
    pub(super) fn new(filter: F, ending: Arc<AtomicBool>) -> Self {
        Self { filter, ending, frames: Frames::new(), passed: Vec::new(), delivered: 0, linger: None }
    }
}

impl<F: StreamFilter> StreamFilter for LateStreams<F> {
    fn poll_read<S: AsyncRead + Unpin>(
        &mut self,
        stream: &mut S,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.ending.load(Ordering::Relaxed) {
            let before = buf.filled().len();
            ready!(self.filter.poll_read(stream, cx, buf))?;
            self.frames.follow(&buf.filled()[before..]);
            return Poll::Ready(Ok(()));
        }
        while self.delivered == self.passed.len() {
            let mut bytes = [0; READ_BYTES];
            let mut read = ReadBuf::new(&mut bytes);
            ready!(self.filter.poll_read(stream, cx, &mut read))?;
            if read.filled().is_empty() {
                return Poll::Ready(Ok(()));
            }
            (self.passed, self.delivered) = (Vec::new(), 0);
            self.frames.filter(read.filled(), &mut self.passed);
        }
        let rest = &self.passed[self.delivered..];
        let some = &rest[..rest.len().min(buf.remaining())];
        buf.put_slice(some);
        self.delivered += some.len();
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown<S: AsyncRead + AsyncWrite + Unpin>(
        &mut self,
        stream: &mut S,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        if self.linger.is_none() {
            ready!(Pin::new(&mut *stream).poll_shutdown(cx))?;
        }
        let linger = self.linger.get_or_insert_with(|| Box::pin(sleep(LINGER)));
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

/// The place in a stream of HTTP/2 frames.
struct Frames {
    /// The bytes of the preface, or of the current frame behind its head, that are still to come.
    rest: usize,
    /// The beginning of the current frame: its header, for a PING also its payload.
    head: Vec<u8>,
    /// The bytes of `head` that have been delivered.
    followed: usize,
    drops: bool,
    last_stream: u32,
    /// Set when the client has acknowledged the end: h2 ignores later streams.
    acknowledged: bool,
}

impl Frames {
    fn new() -> Self {
        Self {
            rest: PREFACE_BYTES,
            head: Vec::with_capacity(HEADER_BYTES + PING_BYTES),
            followed: 0,
            drops: false,
            last_stream: 0,
            acknowledged: false,
        }
    }

    /// Notes the frames in bytes that are delivered as they are.
    fn follow(&mut self, bytes: &[u8]) {
        self.walk(bytes, |_| ());
        self.followed = self.head.len();
    }

    /// Adds the bytes to `passed`, without those of frames to be dropped. The head of a frame is
    /// added once it is complete.
    fn filter(&mut self, bytes: &[u8], passed: &mut Vec<u8>) {
        self.walk(bytes, |some| passed.extend_from_slice(some));
    }

    fn walk(&mut self, mut bytes: &[u8], mut pass: impl FnMut(&[u8])) {
        while !bytes.is_empty() {
            let in_head = self.rest == 0;
            let wanted = if in_head { self.head_bytes() - self.head.len() } else { self.rest };
            let (some, later) = bytes.split_at(wanted.min(bytes.len()));
            bytes = later;
            if !in_head {
                self.rest -= some.len();
                if !self.drops {
                    pass(some);
                }
                continue;
            }
            self.head.extend_from_slice(some);
            if self.head.len() == self.head_bytes() {
                self.begin();
                if !self.drops {
                    pass(&self.head[self.followed..]);
                }
                self.head.clear();
                self.followed = 0;
            }
        }
    }

    fn head_bytes(&self) -> usize {
        let ping = self.head.len() >= HEADER_BYTES && self.head[3] == PING && self.length() == PING_BYTES;
        if ping { HEADER_BYTES + PING_BYTES } else { HEADER_BYTES }
    }

    /// Returns the payload's length in bytes.
    fn length(&self) -> usize {
        self.head[..3].iter().fold(0, |length, byte| length << 8 | usize::from(*byte))
    }

    /// Decides about the frame whose head is complete.
    fn begin(&mut self) {
        let (kind, flags) = (self.head[3], self.head[4]);
        let stream = self.head[5..HEADER_BYTES].iter().fold(0, |id, byte| id << 8 | u32::from(*byte));
        self.rest = self.length() - (self.head.len() - HEADER_BYTES);
        self.drops = false;
        match kind {
            HEADERS if !self.acknowledged => self.last_stream = self.last_stream.max(stream),
            PING if flags & ACK != 0 && self.head[HEADER_BYTES..] == SHUTDOWN_PING => {
                self.acknowledged = true;
            }
            WINDOW_UPDATE if self.acknowledged => self.drops = stream > self.last_stream,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
        let length = u8::try_from(payload.len()).unwrap();
        [&[0, 0, length, kind, flags, 0, 0, 0, stream], payload].concat()
    }

    /// Covers every size of reads, and a shutdown at each byte.
    #[test]
    fn only_updates_of_late_streams_are_dropped() {
        let update = |stream| frame(WINDOW_UPDATE, 0, stream, &[0, 0, 0, 5]);
        let before = [
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(),
            frame(4, 0, 0, &[]),
            frame(HEADERS, 4, 1, &[0x83]),
            update(1),
            frame(PING, ACK, 0, &[7; 8]),
            update(9),
        ]
        .concat();
        let acknowledged = frame(PING, ACK, 0, &SHUTDOWN_PING);
        let late = frame(HEADERS, 4, 3, &[0x83]);
        let data = frame(0, 1, 3, &[0; 5]);
        let sent = [&before[..], &acknowledged, &late, &update(3), &data, &update(0), &update(1)].concat();
        let expected = [&before[..], &acknowledged, &late, &data, &update(0), &update(1)].concat();
        for begins in 0..before.len() {
            for size in 1..40 {
                let (mut frames, mut got) = (Frames::new(), sent[..begins].to_vec());
                frames.follow(&sent[..begins]);
                for bytes in sent[begins..].chunks(size) {
                    frames.filter(bytes, &mut got);
                }
                assert_eq!(got, expected, "shutdown at byte {begins}, reads of {size} bytes");
            }
        }
    }
}
