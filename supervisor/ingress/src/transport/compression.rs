//! gzip and deflate (zlib's format), which both protocols share. A few compressed bytes may become
//! gigabytes, so each caller gives a limit in bytes, memory is reserved as they come, and few are
//! decompressed at a time. The work is done away from the threads that serve connections.

use std::io::{self, Read};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use flate2::Compression;
use flate2::bufread::{GzEncoder, MultiGzDecoder, ZlibDecoder, ZlibEncoder};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;

use crate::admission::memory_permit::Reserved;
use crate::admission::request_error::{RequestError, away, invalid};
use shadowslice_datapath::pipeline::{Pieces, RequestFailure};

/// Compressed requests that are read at a time: each takes a CPU, and many times its memory.
static TURNS: Semaphore = Semaphore::const_new(4);

pub(crate) type Turn = SemaphorePermit<'static>;

/// How long a request may wait for its turn.
const PATIENCE: Duration = Duration::from_secs(10);

/// In bytes, the first piece of what comes and the largest: each is twice as large as the last. A
/// buffer that grows would be there twice.
const PIECES: Range<usize> = 16 << 10..1 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Encoding {
    Gzip,
    Deflate,
}

impl Encoding {
    /// Takes `x-gzip` for gzip, as RFC 9110 asks.
    pub(crate) fn named(name: &str) -> Option<Self> {
        if name.eq_ignore_ascii_case("x-gzip") {
            return Some(Self::Gzip);
        }
        [Self::Gzip, Self::Deflate].into_iter().find(|encoding| encoding.name().eq_ignore_ascii_case(name))
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Gzip => "gzip",
            Self::Deflate => "deflate",
        }
    }

    /// The turn lasts until what was decompressed has been read.
    pub(crate) async fn decompress(
        self,
        bytes: Bytes,
        limit: usize,
        reserved: Arc<Reserved>,
    ) -> Result<(Pieces, Turn), RequestError> {
        let turn = timeout(PATIENCE, TURNS.acquire()).await.ok().and_then(Result::ok).ok_or_else(|| {
            let why = "too many compressed requests at a time; try again later, or send them uncompressed";
            RequestFailure::Unavailable(why.to_owned())
        })?;
        // It goes on when its client has gone.
        away("decompressing the request", move || {
            self.decompress_here(&bytes, limit, &reserved).map(|whole| (whole, turn))
        })
        .await
    }

    fn decompress_here(
        self,
        bytes: &[u8],
        limit: usize,
        reserved: &Reserved,
    ) -> Result<Pieces, RequestError> {
        let (whole, rest) = match self {
            Self::Gzip => (read(&mut MultiGzDecoder::new(bytes), limit, reserved)?, 0),
            Self::Deflate => {
                let mut decoder = ZlibDecoder::new(bytes);
                (read(&mut decoder, limit, reserved)?, decoder.into_inner().len())
            }
        };
        let corrupt = |why| invalid(format!("cannot decompress the request as {}: {why}", self.name()));
        match whole {
            Err(why) => corrupt(why.to_string()),
            Ok(whole) if whole.len() > limit => Err(RequestError::TooLarge(format!(
                "decompressed, the request is larger than {limit} bytes (limits.request_bytes)"
            ))),
            Ok(_) if rest > 0 => corrupt(format!("{rest} bytes follow the end of the compressed data")),
            Ok(whole) => Ok(whole),
        }
    }

    pub(crate) async fn compress(self, bytes: Bytes, reserved: &Reserved) -> Result<Bytes, RequestError> {
        // Compressed bytes are hardly ever more.
        reserved.grow(bytes.len())?;
        away("compressing the answer", move || Ok(self.compress_here(&bytes))).await
    }

    fn compress_here(self, bytes: &[u8]) -> Bytes {
        let mut whole = Vec::with_capacity(bytes.len() / 4 + 64);
        let read = match self {
            Self::Gzip => GzEncoder::new(bytes, Compression::fast()).read_to_end(&mut whole),
            Self::Deflate => ZlibEncoder::new(bytes, Compression::fast()).read_to_end(&mut whole),
        };
        read.expect("reading from memory cannot fail");
        whole.into()
    }
}

/// Reads to the end, or a byte more than `limit`.
fn read(
    reader: &mut impl Read,
    limit: usize,
    reserved: &Reserved,
) -> Result<io::Result<Pieces>, RequestError> {
    let (mut whole, mut next) = (Pieces::default(), PIECES.start);
    loop {
        let room = next.min(limit.saturating_add(1) - whole.len());
        let mut piece = reserved.buffer(room)?;
        match reader.take(room as u64).read_to_end(&mut piece) {
            Ok(read) => {
                whole.push(piece.into());
                if read < room || whole.len() > limit {
                    return Ok(Ok(whole));
                }
            }
            Err(why) => return Ok(Err(why)),
        }
        next = PIECES.end.min(2 * next);
    }
}

/// The format that `Accept-Encoding` prefers to all others; `None` if it prefers the plain body.
pub(crate) fn preferred<'a>(values: impl Iterator<Item = &'a str>) -> Option<Encoding> {
    let items: Vec<_> = values.flat_map(|value| value.split(',')).map(weighed).collect();
    // A star stands for the formats that are not named; a format named with weight 0 is named.
    let is_named =
        |encoding: &Encoding| items.iter().any(|(name, _)| Encoding::named(name) == Some(*encoding));
    let of_star = || [Encoding::Gzip, Encoding::Deflate].into_iter().find(|encoding| !is_named(encoding));
    let (mut best, mut plain): (Option<(Encoding, f32)>, f32) = (None, 0.0);
    for &(name, weight) in items.iter().filter(|(_, weight)| *weight > 0.0) {
        if name.eq_ignore_ascii_case("identity") {
            plain = weight;
        } else if let Some(encoding) = if name == "*" { of_star() } else { Encoding::named(name) }
            && best.is_none_or(|(_, best)| weight > best)
        {
            best = Some((encoding, weight));
        }
    }
    best.filter(|(_, weight)| *weight >= plain).map(|(encoding, _)| encoding)
}

/// A format's name and weight. A missing weight is 1, a malformed weight 0.
fn weighed(item: &str) -> (&str, f32) {
    let mut parts = item.split(';').map(str::trim);
    let name = parts.next().unwrap_or_default();
    let weight = parts.find_map(|part| part.strip_prefix("q=")).map_or(1.0, |q| q.parse().unwrap_or(0.0));
    (name, weight)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::memory_permit::enough;

    const BOTH: [Encoding; 2] = [Encoding::Gzip, Encoding::Deflate];

    #[test]
    fn what_was_compressed_comes_back() {
        for encoding in BOTH {
            for plain in [&b""[..], b"a", &[7; 100_000]] {
                let small = encoding.compress_here(plain);
                assert_eq!(
                    encoding.decompress_here(&small, plain.len(), &enough()).unwrap().into_bytes(),
                    plain
                );
            }
        }
    }

    #[test]
    fn a_bomb_is_put_out_at_the_limit() {
        for encoding in BOTH {
            let bomb = encoding.compress_here(&vec![0; 16 << 20]);
            assert!(bomb.len() < 100_000);
            let limit = (16 << 20) - 1;
            for limit in [limit, 0] {
                let got = encoding.decompress_here(&bomb, limit, &enough());
                assert!(matches!(got, Err(RequestError::TooLarge(_))), "{got:?}");
            }
        }
    }

    #[test]
    fn what_is_cut_or_changed_or_followed_by_more_is_refused() {
        for encoding in BOTH {
            let small = encoding.compress_here(b"hello, hello, hello");
            let corrupt = |bytes: &[u8]| {
                let got = encoding.decompress_here(bytes, 1000, &enough());
                assert!(
                    matches!(got, Err(RequestError::Failed(RequestFailure::Invalid(_)))),
                    "{encoding:?} {bytes:?}: {got:?}"
                );
            };
            (1..small.len()).for_each(|end| corrupt(&small[..end]));
            corrupt(&[&small[..], b"x"].concat());
            corrupt(b"plain text");
            let mut changed = small.to_vec();
            *changed.last_mut().unwrap() ^= 1;
            corrupt(&changed);
        }
    }

    #[test]
    fn names_are_read_in_any_case_and_with_the_old_one_of_gzip() {
        for name in ["gzip", "GZip", "x-gzip", "X-GZIP"] {
            assert_eq!(Encoding::named(name), Some(Encoding::Gzip), "{name}");
        }
        assert_eq!(Encoding::named("Deflate"), Some(Encoding::Deflate));
        for name in ["", "x-deflate", "zlib", "br", "identity"] {
            assert_eq!(Encoding::named(name), None, "{name}");
        }
    }

    #[test]
    fn the_highest_weight_is_preferred() {
        for (accepted, expected) in [
            ("", None),
            ("identity", None),
            ("br", None),
            ("gzip", Some(Encoding::Gzip)),
            ("DEFLATE", Some(Encoding::Deflate)),
            ("x-gzip", Some(Encoding::Gzip)),
            ("deflate;q=0.5, X-GZIP", Some(Encoding::Gzip)),
            ("x-gzip;q=0, *", Some(Encoding::Deflate)),
            ("x-deflate", None),
            ("deflate, gzip", Some(Encoding::Deflate)),
            ("deflate;q=0.5, gzip;q=0.8", Some(Encoding::Gzip)),
            ("gzip;q=0, deflate;q=0.1", Some(Encoding::Deflate)),
            ("gzip;q=0.3, identity", None),
            ("br, *;q=0.1", Some(Encoding::Gzip)),
            ("gzip;q=0, *", Some(Encoding::Deflate)),
            ("gzip;q=0, *;q=0.5, deflate;q=0", None),
            ("*, gzip;q=0.5", Some(Encoding::Deflate)),
            ("gzip;q=x", None),
            (";;,,q=", None),
        ] {
            assert_eq!(preferred([accepted].into_iter()), expected, "{accepted}");
        }
    }
}
