use std::collections::VecDeque;

use futures_util::FutureExt;
use tokio::io::AsyncReadExt;

use super::*;

const PREFACE: &[u8; PREFACE_BYTES] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const CONTINUATION: u8 = 9;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;
const END_HEADERS: u8 = 0x4;

/// A stream that delivers these pieces.
struct Pieces(VecDeque<Vec<u8>>);

impl AsyncRead for Pieces {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if let Some(mut piece) = self.0.pop_front() {
            let rest = piece.split_off(piece.len().min(buf.remaining()));
            buf.put_slice(&piece);
            if !rest.is_empty() {
                self.0.push_front(rest);
            }
        }
        Poll::Ready(Ok(()))
    }
}

fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
    frame_of(1, kind, flags, payload)
}

fn frame_of(stream: u8, kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags, 0, 0, 0, stream], payload].concat()
}

fn string(text: &[u8]) -> Vec<u8> {
    if text.len() < 127 {
        return [&[u8::try_from(text.len()).unwrap()], text].concat();
    }
    let rest = text.len() - 127;
    let (low, high) = (u8::try_from(rest & 0x7f).unwrap() | 0x80, u8::try_from(rest >> 7).unwrap());
    [&[127, low, high], text].concat()
}

/// Returns a field with the given first byte, and a literal value.
fn field(first: u8, value: &[u8]) -> Vec<u8> {
    [vec![first], string(value)].concat()
}

/// Returns fields as clients send them, around an authority.
fn block(authority: &[u8]) -> Vec<u8> {
    [
        vec![0x83, 0x86, 0x3f, 0xe1, 0x1f, 0xff, 0x00],
        field(0x44, b"/inference.GRPCInferenceService/50%"),
        authority.to_vec(),
        [vec![0x40], string(b"user-agent"), string(b"100% grpc")].concat(),
        [vec![0x7f, 0x85, 0x01], string(b"a%b")].concat(),
        field(0x0f, b"").into_iter().take(1).chain([0x03]).chain(string(b"%%%")).collect(),
    ]
    .concat()
}

/// Returns the bytes of a connection. They contain `%` only where it must stay. `^` stands for each
/// character that must be replaced.
fn stream() -> Vec<u8> {
    let long = [b"^2F".repeat(70), b"x.sock".to_vec()].concat();
    let spelled = |first: u8| [vec![first], string(b":authority"), string(b"^2Fa^2Fb")].concat();
    let other = [vec![0x00], string(b":authoritx"), string(b"%2F")].concat();
    let huffman = [vec![0x41, 0x83], b"%%%".to_vec()].concat();
    let whole = block(&field(0x41, b"^2Ftmp^2Fgrpc.sock"));
    let (head, tail) = whole.split_at(70);
    let (tail, end) = tail.split_at(9);
    let padded = [&[3, 1, 2, 3, 4, 5][..], &block(&field(0x01, &long)), b"%%%"].concat();
    [
        PREFACE.to_vec(),
        frame(4, 0, b"\0\x03%%%%"),
        frame(HEADERS, END_HEADERS, &block(&field(0x11, b"^2Frun"))),
        frame(0, 0, b"data % \x41\x03%2F"),
        frame(HEADERS, 0, head),
        frame(CONTINUATION, 0, tail),
        frame(CONTINUATION, 0, b""),
        frame(CONTINUATION, END_HEADERS, end),
        frame(HEADERS, END_HEADERS | PADDED | PRIORITY | 1, &padded),
        frame(HEADERS, END_HEADERS, &[spelled(0x40), spelled(0x10), other, huffman].concat()),
        frame(HEADERS, END_HEADERS, &field(0x41, b"")),
        frame(0, 1, b""),
        frame(HEADERS, END_HEADERS | PRIORITY, &[&b"%%%%%"[..], &field(0x41, b"^")].concat()),
    ]
    .concat()
}

fn with(stream: &[u8], replacement: u8) -> Vec<u8> {
    stream.iter().map(|&byte| if byte == b'^' { replacement } else { byte }).collect()
}

fn repaired(pieces: &[&[u8]]) -> Vec<u8> {
    let pieces = pieces.iter().filter(|piece| !piece.is_empty()).map(|piece| piece.to_vec()).collect();
    let mut reader = RepairedStream::new(Pieces(pieces), NewCalls::default(), true);
    let mut out = Vec::new();
    let read = reader.read_to_end(&mut out).now_or_never();
    read.expect("all pieces are available").unwrap();
    out
}

#[test]
fn authorities_are_repaired_and_nothing_else_wherever_reads_split() {
    let (sent, expected) = (with(&stream(), b'%'), with(&stream(), b'-'));
    assert_ne!(sent, expected);
    for foreign in [b'%', b'/', b' ', b':', b'@', 0xff] {
        assert_eq!(repaired(&[&with(&stream(), foreign)]), expected, "{foreign}");
    }
    assert_eq!(repaired(&sent.chunks(1).collect::<Vec<_>>()), expected);
    for first in 0..sent.len() {
        let (head, tail) = sent.split_at(first);
        assert_eq!(repaired(&[head, tail]), expected, "split at {first}");
        let chunks: Vec<_> = [head].into_iter().chain(tail.chunks(13)).collect();
        assert_eq!(repaired(&chunks), expected, "split at {first} and every 13");
    }
}

#[test]
fn garbage_passes_unchanged_or_loses_only_bytes_that_hosts_cannot_have() {
    let sent = with(&stream(), b'%');
    for place in 0..sent.len() {
        for flip in [0x01, 0x08, 0x20, 0x80, 0xff] {
            let mut spoilt = sent.clone();
            spoilt[place] ^= flip;
            let got = repaired(&[&spoilt]);
            assert_eq!(got.len(), spoilt.len());
            let changed = got.iter().zip(&spoilt).filter(|(got, sent)| got != sent);
            let lost = |(got, sent): (&u8, &u8)| {
                *got == b'-' && !sent.is_ascii_alphanumeric() && !b"-._~".contains(sent)
            };
            assert!(changed.into_iter().all(lost), "{flip:#x} at {place}");
        }
    }
    for garbage in [&b"GET /v2%20 HTTP/1.1\r\nHost: %2F\r\n\r\n"[..], b"PRI * HTTP/2.0%", &[0xff; 99]] {
        assert_eq!(repaired(&[garbage]), garbage);
    }
}

#[test]
fn frames_with_a_false_padding_pass_unchanged() {
    let authority = field(0x41, b"%2F");
    for payload in [&[][..], &[&[200][..], &authority].concat(), &[5, 0, 0, 0, 0]] {
        let sent =
            [&PREFACE[..], &frame(HEADERS, END_HEADERS | PADDED | PRIORITY, payload), &authority].concat();
        assert_eq!(repaired(&[&sent]), sent);
    }
}

#[tokio::test]
async fn a_wrapped_stream_is_repaired_after_the_bytes_that_were_read_before() {
    let sent = with(&stream(), b'%');
    let mut reader = RepairedStream::new(io::Cursor::new(sent), NewCalls::default(), true);
    let mut got = b"%%".to_vec();
    let first = reader.read_u8().await.unwrap();
    got.push(first);
    reader.read_to_end(&mut got).await.unwrap();
    assert_eq!(got, [b"%%", &with(&stream(), b'-')[..]].concat());
}

/// Covers every size of reads.
#[test]
fn only_updates_of_late_streams_are_ignored() {
    let update = |stream| frame_of(stream, WINDOW_UPDATE, 0, &[0, 0, 0, 5]);
    let ignored = |stream| frame_of(stream, IGNORED, 0, &[0, 0, 0, 5]);
    let before = [
        PREFACE.to_vec(),
        frame_of(0, 4, 0, &[]),
        frame(HEADERS, END_HEADERS, &[0x83]),
        update(1),
        frame_of(0, PING, ACK, &[7; 8]),
        frame_of(0, PING, 0, &SHUTDOWN_PING),
        update(9),
        frame_of(0, PING, ACK, &SHUTDOWN_PING),
        frame_of(3, HEADERS, END_HEADERS, &[0x83]),
    ]
    .concat();
    let after = [frame_of(3, 0, 1, &[0; 5]), update(0), update(1)].concat();
    let sent = [&before[..], &update(3), &after].concat();
    let expected = [&before[..], &ignored(3), &after].concat();
    for size in 1..40 {
        assert_eq!(repaired(&sent.chunks(size).collect::<Vec<_>>()), expected, "reads of {size} bytes");
    }
}
