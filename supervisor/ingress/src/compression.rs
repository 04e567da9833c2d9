//! gzip and deflate (zlib's format), which both protocols share. A few compressed bytes may become
//! gigabytes, so each caller gives a limit in bytes; the work is done away from the threads that
//! serve connections.

use std::io::Read;

use bytes::Bytes;
use flate2::Compression;
use flate2::bufread::{GzEncoder, MultiGzDecoder, ZlibDecoder, ZlibEncoder};

use super::request_error::{RequestError, away, invalid};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Encoding {
    Gzip,
    Deflate,
}

impl Encoding {
    pub(super) fn named(name: &str) -> Option<Self> {
        [Self::Gzip, Self::Deflate].into_iter().find(|encoding| encoding.name().eq_ignore_ascii_case(name))
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Gzip => "gzip",
            Self::Deflate => "deflate",
        }
    }

    pub(super) async fn decompress(self, bytes: Bytes, limit: usize) -> Result<Bytes, RequestError> {
        away("decompressing the request", move || self.decompress_here(&bytes, limit)).await
    }

    fn decompress_here(self, bytes: &[u8], limit: usize) -> Result<Bytes, RequestError> {
        let mut whole = Vec::new();
        let most = u64::try_from(limit).unwrap_or(u64::MAX).saturating_add(1);
        let read = match self {
            Self::Gzip => MultiGzDecoder::new(bytes).take(most).read_to_end(&mut whole).map(|_| 0),
            Self::Deflate => {
                let mut decoder = ZlibDecoder::new(bytes).take(most);
                let read = decoder.read_to_end(&mut whole);
                read.map(|_| decoder.into_inner().into_inner().len())
            }
        };
        let corrupt = |why| invalid(format!("the request cannot be decompressed as {}: {why}", self.name()));
        match read {
            Err(why) => corrupt(why.to_string()),
            Ok(_) if whole.len() > limit => Err(RequestError::TooLarge(format!(
                "decompressed, the request is larger than {limit} bytes (limits.request_bytes)"
            ))),
            Ok(0) => Ok(whole.into()),
            Ok(rest) => corrupt(format!("{rest} bytes follow its end")),
        }
    }

    pub(super) async fn compress(self, bytes: Bytes) -> Result<Bytes, RequestError> {
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

/// The format that `Accept-Encoding` prefers to all others; `None` if it prefers the plain body.
pub(super) fn preferred<'a>(values: impl Iterator<Item = &'a str>) -> Option<Encoding> {
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
    use shadowslice_datapath::pipeline::Failure;

    const BOTH: [Encoding; 2] = [Encoding::Gzip, Encoding::Deflate];

    #[test]
    fn what_was_compressed_comes_back() {
        for encoding in BOTH {
            for plain in [&b""[..], b"a", &[7; 100_000]] {
                let small = encoding.compress_here(plain);
                assert_eq!(encoding.decompress_here(&small, plain.len()).unwrap(), plain);
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
                let got = encoding.decompress_here(&bomb, limit);
                assert!(matches!(got, Err(RequestError::TooLarge(_))), "{got:?}");
            }
        }
    }

    #[test]
    fn what_is_cut_or_changed_or_followed_by_more_is_refused() {
        for encoding in BOTH {
            let small = encoding.compress_here(b"hello, hello, hello");
            let corrupt = |bytes: &[u8]| {
                let got = encoding.decompress_here(bytes, 1000);
                assert!(
                    matches!(got, Err(RequestError::Failed(Failure::Invalid(_)))),
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
    fn the_highest_weight_is_preferred() {
        for (accepted, expected) in [
            ("", None),
            ("identity", None),
            ("br", None),
            ("gzip", Some(Encoding::Gzip)),
            ("DEFLATE", Some(Encoding::Deflate)),
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
