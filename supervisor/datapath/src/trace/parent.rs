//! The trace that a request belongs to: W3C Trace Context, level 1.

use http::HeaderMap;
use http::header::{HeaderName, HeaderValue};

const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// The length of version 00, and of the part that every later version begins with.
const LENGTH: usize = 55;

/// The only flag of level 1: whether the caller traces the request.
const SAMPLED: u8 = 1;

/// The most members of a `tracestate`.
const MAX_MEMBERS: usize = 32;

/// The most bytes of a `tracestate` that are passed on; members at its end are left out beyond that.
const MAX_STATE_BYTES: usize = 512;

/// The span that a request comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parent {
    /// Its trace.
    pub trace_id: u128,
    /// The span.
    pub span_id: u64,
    /// Whether it is traced.
    pub sampled: bool,
}

impl Parent {
    /// The parent that headers name. A missing, malformed or repeated header counts as no parent.
    pub fn of(headers: &HeaderMap) -> Option<Self> {
        let mut values = headers.get_all(TRACEPARENT).iter();
        match (values.next(), values.next()) {
            (Some(value), None) => Self::parse(value.as_bytes()),
            _ => None,
        }
    }

    /// Reads `00-TRACE-SPAN-FLAGS`. What a later version appends is not read.
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

/// A number of lower-case hexadecimal digits, at most 32 of them.
fn hex(digits: &[u8]) -> Option<u128> {
    let known = digits.iter().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
    let digits = std::str::from_utf8(digits).ok().filter(|_| known)?;
    u128::from_str_radix(digits, 16).ok()
}

/// The state that travels with a trace, as one list. Empty if the header is missing or malformed.
pub(super) fn state(headers: &HeaderMap) -> String {
    let values = headers.get_all(TRACESTATE).iter().map(HeaderValue::to_str);
    values.collect::<Result<Vec<_>, _>>().ok().and_then(|lists| combined(&lists)).unwrap_or_default()
}

/// The members of all lists; `None` if a list is malformed or a key stands twice.
fn combined(lists: &[&str]) -> Option<String> {
    let members = lists.iter().flat_map(|list| list.split(','));
    let members = members.map(|member| member.trim_matches([' ', '\t'])).filter(|member| !member.is_empty());
    let mut keys: Vec<&str> = Vec::new();
    let mut state = String::new();
    for member in members {
        let (key, value) = member.split_once('=')?;
        if !is_key(key) || !is_value(value) || keys.contains(&key) || keys.len() == MAX_MEMBERS {
            return None;
        }
        keys.push(key);
        state.push_str(if state.is_empty() { "" } else { "," });
        state.push_str(member);
    }
    while state.len() > MAX_STATE_BYTES {
        state.truncate(state.rfind(',').unwrap_or(0));
    }
    Some(state)
}

/// `key`, or `tenant@system`.
fn is_key(key: &str) -> bool {
    let is_rest = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || b"_-*/".contains(&c);
    let is_part = |part: &str, most: usize, digit_first: bool| {
        let first = part.bytes().next();
        let begins = first.is_some_and(|c| c.is_ascii_lowercase() || (digit_first && c.is_ascii_digit()));
        begins && part.len() <= most && part.bytes().all(is_rest)
    };
    match key.split_once('@') {
        None => is_part(key, 256, false),
        Some((tenant, system)) => is_part(tenant, 241, true) && is_part(system, 14, false),
    }
}

/// Printable, at most 256 bytes, and not a space at its end.
fn is_value(value: &str) -> bool {
    let is_printable = |c: u8| (b' '..=b'~').contains(&c) && !b",=".contains(&c);
    !value.is_empty() && value.len() <= 256 && value.bytes().all(is_printable) && !value.ends_with(' ')
}

#[cfg(test)]
#[path = "parent_tests.rs"]
mod tests;
