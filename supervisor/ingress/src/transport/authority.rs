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

use std::ops::Range;

const AUTHORITY: &[u8; 10] = b":authority";

const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;
const PRIORITY_BYTES: usize = 5;

/// Repairs the authority in the payload of a HEADERS frame. Leaves malformed frames to `h2`.
pub(super) fn repair_authority(payload: &mut [u8], flags: u8) {
    let _ = header_block(payload, flags).and_then(repair_block);
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
