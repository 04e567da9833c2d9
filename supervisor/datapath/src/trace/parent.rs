//! The trace to which a client's request belongs, according to W3C Trace Context, level 1.

use http::HeaderMap;
use http::header::HeaderName;

const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// The length of a `traceparent` header of version 00, in bytes. Headers of later versions begin
/// with the same fields.
const LENGTH: usize = 55;

/// The only flag that level 1 defines: the caller traces the request.
const SAMPLED: u8 = 1;

/// The longest `tracestate` that is kept, in bytes.
const MAX_STATE_BYTES: usize = 512;

/// The caller's span, which is the parent of a request's span.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceParent {
    pub trace_id: u128,
    pub span_id: u64,
    pub sampled: bool,
}

impl TraceParent {
    /// Returns the parent that the headers specify. Returns `None` if the header is missing,
    /// malformed or repeated.
    pub fn of(headers: &HeaderMap) -> Option<Self> {
        let mut values = headers.get_all(TRACEPARENT).iter();
        match (values.next(), values.next()) {
            (Some(value), None) => Self::parse(value.as_bytes()),
            _ => None,
        }
    }

    /// Parses `00-TRACE-SPAN-FLAGS`. Ignores fields that a later version appends.
    pub fn parse(text: &[u8]) -> Option<Self> {
        let (known, rest) = text.split_at_checked(LENGTH)?;
        let dashes = [2, 35, 52].into_iter().all(|place| known[place] == b'-');
        let version = u8::try_from(hex(&known[..2])?).ok().filter(|version| *version != 0xff)?;
        let follows = match version {
            0 => rest.is_empty(),
            _ => rest.is_empty() || rest.starts_with(b"-"),
        };
        let trace_id = hex(&known[3..35])?;
        let span_id = u64::try_from(hex(&known[36..52])?).ok()?;
        let flags = u8::try_from(hex(&known[53..])?).ok()?;
        let whole = dashes && follows && trace_id != 0 && span_id != 0;
        whole.then_some(Self { trace_id, span_id, sampled: flags & SAMPLED != 0 })
    }
}

/// Parses at most 32 lower-case hexadecimal digits.
fn hex(digits: &[u8]) -> Option<u128> {
    let known = digits.iter().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
    let digits = std::str::from_utf8(digits).ok().filter(|_| known)?;
    u128::from_str_radix(digits, 16).ok()
}

/// Returns the vendors' state of a trace (`tracestate`) as one list. Removes members from the end
/// until the list fits into [`MAX_STATE_BYTES`]. Only the collector interprets the list.
pub(super) fn state(headers: &HeaderMap) -> String {
    let lists = headers.get_all(TRACESTATE).iter().filter_map(|value| value.to_str().ok());
    let mut state = lists.collect::<Vec<_>>().join(",");
    while state.len() > MAX_STATE_BYTES {
        state.truncate(state.rfind(',').unwrap_or(0));
    }
    state
}

#[cfg(test)]
#[path = "parent_tests.rs"]
mod tests;
