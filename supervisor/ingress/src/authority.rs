//! Lets gRPC clients in over Unix sockets.
//!
//! gRPC's C core (and with it the Python, C++, Ruby and PHP clients) sends the socket's path,
//! percent-encoded, as `:authority`; Java's client sends it as it is. The `h2` crate takes `%` and
//! `/` for a fault and resets the stream with PROTOCOL_ERROR (hyperium/h2#487). The supervisor does
//! not read the authority, so each character that no host has becomes `-` before `h2` sees it: same
//! length, same frames, same compression state.
//!
//! Only plain literals are repaired, under the static table's name or the name spelled out; these
//! clients send nothing else. A Huffman-coded authority passes unchanged, as does everything
//! malformed. Once `h2` accepts such an authority, this file and its only use can go.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const AUTHORITY: &[u8; 10] = b":authority";

const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;
const PRIORITY_BYTES: usize = 5;

/// A stream whose incoming authorities are repaired; outgoing bytes are left alone.
pub(super) struct AuthorityRepair<S> {
    stream: S,
    walk: Walk,
}

impl<S> AuthorityRepair<S> {
    pub(super) fn new(stream: S) -> Self {
        Self { stream, walk: Walk::default() }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for AuthorityRepair<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(cx, buf);
        self.walk.repair(&mut buf.filled_mut()[before..]);
        polled
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for AuthorityRepair<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
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
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// The walk over the frames, which stops and goes on at any byte.
#[derive(Default)]
struct Walk {
    place: Position,
    /// The header block under way, until its END_HEADERS.
    block: Option<Block>,
}

/// Where the next byte lies.
#[derive(Clone, Copy)]
enum Position {
    Preface {
        seen: usize,
    },
    Head {
        seen: usize,
        head: [u8; 9],
    },
    PadLength {
        frame: Fragment,
    },
    Fragment(Fragment),
    Skip {
        left: usize,
    },
    /// Not HTTP/2 as known here: `h2` finds the fault.
    Lost,
}

/// The rest of a frame that carries a piece of a header block.
#[derive(Clone, Copy)]
struct Fragment {
    priority: usize,
    left: usize,
    padding: usize,
    last: bool,
}

impl Default for Position {
    fn default() -> Self {
        Self::Preface { seen: 0 }
    }
}

impl Position {
    const HEAD: Self = Self::Head { seen: 0, head: [0; 9] };

    fn skip(left: usize) -> Self {
        if left == 0 { Self::HEAD } else { Self::Skip { left } }
    }
}

impl Walk {
    fn repair(&mut self, mut bytes: &mut [u8]) {
        while !bytes.is_empty() {
            let taken = self.step(bytes);
            bytes = &mut bytes[taken..];
        }
    }

    /// Takes at least one byte; returns how many.
    fn step(&mut self, bytes: &mut [u8]) -> usize {
        let (place, taken) = match self.place {
            Position::Preface { seen } if bytes[0] != PREFACE[seen] => (Position::Lost, 1),
            Position::Preface { seen } if seen + 1 == PREFACE.len() => (Position::HEAD, 1),
            Position::Preface { seen } => (Position::Preface { seen: seen + 1 }, 1),
            Position::Head { seen, mut head } => {
                head[seen] = bytes[0];
                (
                    if seen + 1 == head.len() {
                        self.frame(head)
                    } else {
                        Position::Head { seen: seen + 1, head }
                    },
                    1,
                )
            }
            Position::PadLength { mut frame } => {
                frame.padding = usize::from(bytes[0]);
                (self.fragment(frame, 1), 1)
            }
            Position::Fragment(frame) => self.piece(frame, bytes),
            Position::Skip { left } => {
                let taken = left.min(bytes.len());
                (Position::skip(left - taken), taken)
            }
            Position::Lost => (Position::Lost, bytes.len()),
        };
        self.place = place;
        taken
    }

    /// The position after a frame's head.
    fn frame(&mut self, head: [u8; 9]) -> Position {
        let [high, middle, low, kind, flags, ..] = head;
        let left = usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low);
        let has = |flag| kind == HEADERS && flags & flag != 0;
        match (kind, self.block.is_some()) {
            (HEADERS, false) => self.block = Some(Block::default()),
            (CONTINUATION, true) => {}
            (_, false) => return Position::skip(left),
            (_, true) => return Position::Lost,
        }
        let priority = if has(PRIORITY) { PRIORITY_BYTES } else { 0 };
        let frame = Fragment { priority, left, padding: 0, last: flags & END_HEADERS != 0 };
        match (has(PADDED), left) {
            (true, 0) => Position::Lost,
            (true, _) => Position::PadLength { frame },
            (false, _) => self.fragment(frame, 0),
        }
    }

    /// Takes everything that is no header block off the frame's length, `used` bytes of which are
    /// already read.
    fn fragment(&mut self, mut frame: Fragment, used: usize) -> Position {
        match frame.left.checked_sub(used + frame.priority + frame.padding) {
            Some(left) => {
                frame.left = left;
                self.go_on(frame)
            }
            None => Position::Lost,
        }
    }

    /// Reads priority or header block.
    fn piece(&mut self, mut frame: Fragment, bytes: &mut [u8]) -> (Position, usize) {
        let taken = if frame.priority > 0 {
            let taken = frame.priority.min(bytes.len());
            frame.priority -= taken;
            taken
        } else {
            let taken = frame.left.min(bytes.len());
            frame.left -= taken;
            if let Some(block) = &mut self.block {
                bytes[..taken].iter_mut().for_each(|byte| block.take(byte));
            }
            taken
        };
        (self.go_on(frame), taken)
    }

    fn go_on(&mut self, frame: Fragment) -> Position {
        if frame.priority + frame.left > 0 {
            return Position::Fragment(frame);
        }
        if frame.last {
            self.block = None;
        }
        Position::skip(frame.padding)
    }
}

/// The walk over one header block (HPACK, RFC 7541).
#[derive(Default)]
struct Block(HeaderPart);

/// The meaning of the next byte of a header block.
#[derive(Clone, Copy, Default)]
enum HeaderPart {
    /// A field's first byte.
    #[default]
    Field,
    /// More of an index or table size; then a field.
    Number,
    /// More of the index of a name; then the value. Never the name of the authority: its index is
    /// 1.
    Index,
    /// A string's length.
    Length(Text),
    /// More of it.
    LengthRest { text: Text, plain: bool, sum: usize, shift: u32 },
    /// A string's byte.
    Byte { text: Text, left: usize },
    /// Malformed.
    Lost,
}

#[derive(Clone, Copy)]
enum Text {
    /// A name, of which `same` bytes have been those of `:authority`; `None` once it differs.
    Name { same: Option<usize> },
    /// A value, and whether it is the authority's.
    Value { authority: bool },
}

impl Block {
    fn take(&mut self, byte: &mut u8) {
        self.0 = match self.0 {
            HeaderPart::Field => field(*byte),
            HeaderPart::Number if *byte & 0x80 == 0 => HeaderPart::Field,
            HeaderPart::Index if *byte & 0x80 == 0 => HeaderPart::Length(Text::Value { authority: false }),
            HeaderPart::Length(text) => {
                let (plain, length) = (*byte & 0x80 == 0, usize::from(*byte & 0x7f));
                if length == 0x7f {
                    HeaderPart::LengthRest { text, plain, sum: length, shift: 0 }
                } else {
                    string(text, plain, length)
                }
            }
            HeaderPart::LengthRest { shift, .. } if shift > 21 => HeaderPart::Lost,
            HeaderPart::LengthRest { text, plain, sum, shift } => {
                let sum = sum + (usize::from(*byte & 0x7f) << shift);
                if *byte & 0x80 == 0 {
                    string(text, plain, sum)
                } else {
                    HeaderPart::LengthRest { text, plain, sum, shift: shift + 7 }
                }
            }
            HeaderPart::Byte { text, left } => read(text, left - 1, byte),
            step @ (HeaderPart::Number | HeaderPart::Index | HeaderPart::Lost) => step,
        };
    }
}

/// The part after a field's first byte.
fn field(byte: u8) -> HeaderPart {
    let number = |mask: u8| if byte & mask == mask { HeaderPart::Number } else { HeaderPart::Field };
    let literal = |mask: u8| match byte & mask {
        0 => HeaderPart::Length(Text::Name { same: Some(0) }),
        index if index == mask => HeaderPart::Index,
        index => HeaderPart::Length(Text::Value { authority: index == 1 }),
    };
    match byte {
        0x80.. => number(0x7f),
        0x40.. => literal(0x3f),
        0x20.. => number(0x1f),
        _ => literal(0x0f),
    }
}

/// The part after a string's length.
fn string(text: Text, plain: bool, length: usize) -> HeaderPart {
    let text = match text {
        Text::Name { .. } => Text::Name { same: (plain && length == AUTHORITY.len()).then_some(0) },
        Text::Value { authority } => Text::Value { authority: authority && plain },
    };
    if length > 0 { HeaderPart::Byte { text, left: length } } else { after(text) }
}

fn is_of_a_host(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.' | b'_' | b'~')
}

/// Reads one byte of a string, and repairs it where it must be repaired.
fn read(text: Text, left: usize, byte: &mut u8) -> HeaderPart {
    let text = match text {
        Text::Name { same } => {
            Text::Name { same: same.filter(|&same| AUTHORITY[same] == *byte).map(|same| same + 1) }
        }
        Text::Value { authority } => {
            // A character that no host has, such as a path's slash. The supervisor does not read
            // it.
            if authority && !is_of_a_host(*byte) {
                *byte = b'-';
            }
            text
        }
    };
    if left > 0 { HeaderPart::Byte { text, left } } else { after(text) }
}

fn after(text: Text) -> HeaderPart {
    match text {
        Text::Name { same } => HeaderPart::Length(Text::Value { authority: same == Some(AUTHORITY.len()) }),
        Text::Value { .. } => HeaderPart::Field,
    }
}

#[cfg(test)]
#[path = "authority_tests.rs"]
mod tests;
