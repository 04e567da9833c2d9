//! The repair of the authority that gRPC clients send over Unix sockets.
//!
//! gRPC's C core (and with it the Python, C++, Ruby and PHP clients) sends the socket's path,
//! percent-encoded, as `:authority`. Java's client sends the path as it is. The `h2` crate refuses
//! `%` and `/`, and resets the stream with PROTOCOL_ERROR (hyperium/h2#487). The supervisor does
//! not read the authority, so each character that a host name cannot contain becomes `-` before
//! `h2` sees it. Lengths, frames and the compression state stay the same.
//!
//! Only plain literals are repaired, with the name from the static table or the name spelled out,
//! in the first frame of a header block. These clients send nothing else. A Huffman-coded authority
//! and everything malformed pass unchanged. As soon as `h2` accepts such an authority, this file
//! and its only use can be removed.

use std::io;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, ReadBuf};

use super::call_head::MAX_FRAME_BYTES;
use super::stream_filter::StreamFilter;

const PREFACE_BYTES: usize = 24;
const HEAD_BYTES: usize = 9;
const AUTHORITY: &[u8; 10] = b":authority";

const HEADERS: u8 = 1;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;
const PRIORITY_BYTES: usize = 5;

/// A filter that repairs authorities.
pub(super) struct AuthorityRepair {
    /// The number of bytes before the head of the next frame.
    skip: usize,
    /// The beginning of an incomplete frame, which `h2` cannot use yet.
    held: Vec<u8>,
    /// The number of these bytes that can be passed on.
    free: usize,
}

impl AuthorityRepair {
    pub(super) fn new() -> Self {
        Self { skip: PREFACE_BYTES, held: Vec::new(), free: 0 }
    }
}

impl StreamFilter for AuthorityRepair {
    fn poll_read<S: AsyncRead + Unpin>(
        &mut self,
        stream: &mut S,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Self { skip, held, free } = self;
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
                let (repaired, at_end) = (repair(received, skip), received.is_empty());
                held.extend_from_slice(&received[repaired..]);
                buf.set_filled(before + repaired);
                if repaired > 0 || at_end {
                    return Poll::Ready(Ok(()));
                }
            } else {
                let mut room = [0; 1024];
                let mut received = ReadBuf::new(&mut room);
                ready!(Pin::new(&mut *stream).poll_read(cx, &mut received))?;
                held.extend_from_slice(received.filled());
                *free = if received.filled().is_empty() { held.len() } else { repair(held, skip) };
            }
        }
    }
}

/// Repairs the complete frames in `bytes`, which begin `skip` bytes before the head of a frame.
/// Returns the number of bytes that can be passed on.
fn repair(bytes: &mut [u8], skip: &mut usize) -> usize {
    let mut done = 0;
    loop {
        let skipped = (bytes.len() - done).min(*skip);
        done += skipped;
        *skip -= skipped;
        let Some((head, rest)) = bytes[done..].split_first_chunk_mut::<HEAD_BYTES>() else { return done };
        let [high, middle, low, kind, flags, ..] = *head;
        let length = usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low);
        // Longer frames are not held, because `h2` refuses them.
        if kind == HEADERS && length <= MAX_FRAME_BYTES as usize {
            let Some(payload) = rest.get_mut(..length) else { return done };
            // Malformed frames are left to `h2`, too.
            let _ = header_block(payload, flags).and_then(repair_block);
        }
        *skip = HEAD_BYTES + length;
    }
}

fn header_block(payload: &mut [u8], flags: u8) -> Option<&mut [u8]> {
    let (mut start, mut end) = (0, payload.len());
    if flags & PADDED != 0 {
        end = end.checked_sub(usize::from(*payload.first()?))?;
        start += 1;
    }
    if flags & PRIORITY != 0 {
        start += PRIORITY_BYTES;
    }
    payload.get_mut(start..end)
}

/// Repairs the fields before the first fault of a header block (HPACK, RFC 7541). Returns `None` if
/// there is a fault.
fn repair_block(block: &mut [u8]) -> Option<()> {
    let mut at = 0;
    while let Some(&first) = block.get(at) {
        let (prefix, is_literal) = match first {
            0x80.. => (7, false),
            0x40.. => (6, true),
            0x20.. => (5, false),
            _ => (4, true),
        };
        let index = integer(block, &mut at, prefix)?;
        if !is_literal {
            continue;
        }
        let is_authority = if index == 0 {
            let (name, plain) = string(block, &mut at)?;
            plain && block[name] == *AUTHORITY
        } else {
            index == 1
        };
        let (value, plain) = string(block, &mut at)?;
        if is_authority && plain {
            let foreign = block[value].iter_mut().filter(|byte| !is_host_byte(**byte));
            foreign.for_each(|byte| *byte = b'-');
        }
    }
    Some(())
}

fn is_host_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~')
}

fn integer(block: &[u8], at: &mut usize, bits: u32) -> Option<usize> {
    let mut next = || {
        let byte = usize::from(*block.get(*at)?);
        *at += 1;
        Some(byte)
    };
    let most = (1 << bits) - 1;
    let mut value = next()? & most;
    if value < most {
        return Some(value);
    }
    for shift in [0, 7, 14, 21] {
        let byte = next()?;
        value += (byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

/// Returns the range of a string, and whether the string is plain, without Huffman's code.
fn string(block: &[u8], at: &mut usize) -> Option<(Range<usize>, bool)> {
    let plain = *block.get(*at)? & 0x80 == 0;
    let length = integer(block, at, 7)?;
    let place = *at..*at + length;
    *at = place.end;
    block.get(place.clone()).map(|_| (place, plain))
}

#[cfg(test)]
#[path = "authority_tests.rs"]
mod tests;
