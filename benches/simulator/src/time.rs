//! Moments as nanoseconds, in which the world counts, and back.

use std::time::Duration;

use shadowslice_shared::units::Timestamp;

pub(crate) const NEVER: u64 = u64::MAX;

const NS_PER_SECOND: u64 = 1_000_000_000;

pub(crate) fn ns(span: Duration) -> u64 {
    span.as_secs().saturating_mul(NS_PER_SECOND).saturating_add(u64::from(span.subsec_nanos()))
}

pub(crate) fn at_ns(moment: Timestamp) -> u64 {
    ns(moment.since_origin())
}

pub(crate) fn moment(ns: u64) -> Timestamp {
    Timestamp::after_origin(Duration::from_nanos(ns))
}

pub(crate) fn seconds_to_ns(seconds: f64) -> u64 {
    // Saturates at either end, as casts from floats do.
    (seconds * NS_PER_SECOND as f64).round() as u64
}

pub(crate) fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}
