//! Conversions between timestamps and the nanoseconds of the virtual clock.

use std::time::Duration;

use shadowslice_shared::units::Timestamp;

/// The time that a stopped timer has.
pub(crate) const NEVER: u64 = u64::MAX;

const NS_PER_SECOND: u64 = 1_000_000_000;

pub(crate) fn ns(span: Duration) -> u64 {
    span.as_secs().saturating_mul(NS_PER_SECOND).saturating_add(u64::from(span.subsec_nanos()))
}

/// Returns the virtual time of a timestamp, in nanoseconds.
pub(crate) fn at_ns(timestamp: Timestamp) -> u64 {
    ns(timestamp.since_origin())
}

/// Returns the timestamp of a virtual time in nanoseconds.
pub(crate) fn timestamp(ns: u64) -> Timestamp {
    Timestamp::after_origin(Duration::from_nanos(ns))
}

pub(crate) fn seconds_to_ns(seconds: f64) -> u64 {
    // A number outside the range of `u64` becomes the nearest end of that range.
    (seconds * NS_PER_SECOND as f64).round() as u64
}

pub(crate) fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}
