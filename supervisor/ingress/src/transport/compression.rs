//! gzip and deflate (zlib's format), which both protocols share. A few compressed bytes may become
//! gigabytes. So each caller gives a limit in bytes, memory is taken as bytes are decompressed, and
//! few requests are decompressed at a time. The work runs on threads that serve no connections.

use std::io::Read;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use flate2::Compression;
use flate2::bufread::{GzEncoder, MultiGzDecoder, ZlibDecoder, ZlibEncoder};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::timeout;

use crate::admission::{MemoryPermit, RequestError, run_blocking};
use shadowslice_datapath::pipeline::{Pieces, RequestFailure};

/// The permits for compressed requests, which limit how many are read at a time. Each takes a CPU,
/// and many times its memory.
static PERMITS: Semaphore = Semaphore::const_new(4);

/// The time that a request waits for a permit.
const PERMIT_TIMEOUT: Duration = Duration::from_secs(10);

/// The sizes of the first and of the largest piece of a decompressed request, in bytes. Each piece
/// is twice as large as the one before. A single buffer would need its memory twice while it grows.
const PIECE_BYTES: Range<usize> = 16 << 10..1 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Encoding {
    Gzip,
    Deflate,
}

impl Encoding {
    /// Parses the name of a format. Accepts `x-gzip` for gzip, as RFC 9110 requires.
    pub(crate) fn parse(name: &str) -> Option<Self> {
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

    /// Decompresses a request. The permit lasts until the decompressed request has been parsed.
    pub(crate) async fn decompress(
        self,
        bytes: Bytes,
        limit: usize,
        permit: Arc<MemoryPermit>,
    ) -> Result<(Pieces, SemaphorePermit<'static>), RequestError> {
        let turn =
            timeout(PERMIT_TIMEOUT, PERMITS.acquire()).await.ok().and_then(Result::ok).ok_or_else(|| {
                let why =
                    "too many compressed requests at a time; try again later, or send them uncompressed";
                RequestFailure::Unavailable(why.to_owned())
            })?;
        // The work continues after a disconnect of the client.
        run_blocking("decompressing the request", move || {
            self.decompress_here(&bytes, limit, &permit).map(|whole| (whole, turn))
        })
        .await
    }

    fn decompress_here(
        self,
        mut bytes: &[u8],
        limit: usize,
        permit: &MemoryPermit,
    ) -> Result<Pieces, RequestError> {
        let corrupt = |why: String| {
            RequestFailure::Invalid(format!("cannot decompress the request as {}: {why}", self.name()))
        };
        let mut reader: Box<dyn Read> = match self {
            Self::Gzip => Box::new(MultiGzDecoder::new(&mut bytes)),
            Self::Deflate => Box::new(ZlibDecoder::new(&mut bytes)),
        };
        let (mut whole, mut next) = (Pieces::default(), PIECE_BYTES.start);
        loop {
            let room = next.min(limit.saturating_add(1) - whole.len());
            let mut piece = permit.buffer(room)?;
            let read = reader.by_ref().take(room as u64).read_to_end(&mut piece);
            let read = read.map_err(|why| corrupt(why.to_string()))?;
            whole.push(piece.into());
            if whole.len() > limit {
                return Err(RequestError::TooLarge(format!(
                    "decompressed, the request is larger than {limit} bytes (limits.request_bytes)"
                )));
            }
            if read < room {
                break;
            }
            next = PIECE_BYTES.end.min(2 * next);
        }
        drop(reader);
        match bytes.len() {
            0 => Ok(whole),
            rest => Err(corrupt(format!("{rest} bytes follow the end of the compressed data")).into()),
        }
    }

    pub(crate) async fn compress(self, bytes: Bytes, permit: &MemoryPermit) -> Result<Bytes, RequestError> {
        // Compression hardly ever makes an answer larger.
        permit.grow(bytes.len())?;
        run_blocking("compressing the answer", move || Ok(self.compress_here(&bytes))).await
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

/// Returns the format that `Accept-Encoding` prefers, or `None` if it prefers the plain body.
pub(crate) fn preferred_encoding<'a>(values: impl Iterator<Item = &'a str>) -> Option<Encoding> {
    let items: Vec<_> = values.flat_map(|value| value.split(',')).map(parse_item).collect();
    // A star stands for the formats that are not named. A format with weight 0 also counts as
    // named.
    let is_named =
        |encoding: &Encoding| items.iter().any(|(name, _)| Encoding::parse(name) == Some(*encoding));
    let of_star = || [Encoding::Gzip, Encoding::Deflate].into_iter().find(|encoding| !is_named(encoding));
    let (mut best, mut plain): (Option<(Encoding, f32)>, f32) = (None, 0.0);
    for &(name, weight) in items.iter().filter(|(_, weight)| *weight > 0.0) {
        if name.eq_ignore_ascii_case("identity") {
            plain = weight;
        } else if let Some(encoding) = if name == "*" { of_star() } else { Encoding::parse(name) }
            && best.is_none_or(|(_, best)| weight > best)
        {
            best = Some((encoding, weight));
        }
    }
    best.filter(|(_, weight)| *weight >= plain).map(|(encoding, _)| encoding)
}

/// Parses the name and the weight of a format. A missing weight is 1, a malformed weight 0.
fn parse_item(item: &str) -> (&str, f32) {
    let mut parts = item.split(';').map(str::trim);
    let name = parts.next().unwrap_or_default();
    let weight = parts.find_map(|part| part.strip_prefix("q=")).map_or(1.0, |q| q.parse().unwrap_or(0.0));
    (name, weight)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::unlimited;

    const BOTH: [Encoding; 2] = [Encoding::Gzip, Encoding::Deflate];

    #[test]
    fn what_was_compressed_comes_back() {
        for encoding in BOTH {
            for plain in [&b""[..], b"a", &[7; 100_000]] {
                let small = encoding.compress_here(plain);
                assert_eq!(
                    encoding.decompress_here(&small, plain.len(), &unlimited()).unwrap().into_bytes(),
                    plain
                );
            }
        }
    }

    #[test]
    fn a_bomb_is_refused_at_the_limit() {
        for encoding in BOTH {
            let bomb = encoding.compress_here(&vec![0; 16 << 20]);
            assert!(bomb.len() < 100_000);
            let limit = (16 << 20) - 1;
            for limit in [limit, 0] {
                let got = encoding.decompress_here(&bomb, limit, &unlimited());
                assert!(matches!(got, Err(RequestError::TooLarge(_))), "{got:?}");
            }
        }
    }

    #[test]
    fn data_that_is_cut_or_changed_or_followed_by_more_is_refused() {
        for encoding in BOTH {
            let small = encoding.compress_here(b"hello, hello, hello");
            let corrupt = |bytes: &[u8]| {
                let got = encoding.decompress_here(bytes, 1000, &unlimited());
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
    fn names_are_parsed_in_any_case_and_with_the_old_one_of_gzip() {
        for name in ["gzip", "GZip", "x-gzip", "X-GZIP"] {
            assert_eq!(Encoding::parse(name), Some(Encoding::Gzip), "{name}");
        }
        assert_eq!(Encoding::parse("Deflate"), Some(Encoding::Deflate));
        for name in ["", "x-deflate", "zlib", "br", "identity"] {
            assert_eq!(Encoding::parse(name), None, "{name}");
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
            assert_eq!(preferred_encoding([accepted].into_iter()), expected, "{accepted}");
        }
    }
}
