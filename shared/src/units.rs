//! Units: shares of a GPU, numbers of streaming multiprocessors (SMs), and points in time.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A share of a GPU's SMs in whole percent. `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE` uses the same unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct Percent(u32);

/// The error for a number that is not a percentage from 1 to 100. It contains the number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("invalid share {0}; give a whole percentage from 1 to 100")]
pub struct InvalidShare(pub u32);

impl Percent {
    /// The share of a worker that may use the whole GPU, 100 %.
    pub const WHOLE: Self = Self(100);

    /// Returns a share of `percent` percent. Returns an error if the number is not from 1 to 100.
    pub const fn new(percent: u32) -> Result<Self, InvalidShare> {
        match percent {
            1..=100 => Ok(Self(percent)),
            _ => Err(InvalidShare(percent)),
        }
    }

    /// Returns all shares, from 1 % to 100 %.
    pub fn all() -> impl Iterator<Item = Self> {
        (1..=100).map(Self)
    }

    /// Returns the share in percent, 1 to 100.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// Estimates the number of SMs that MPS gives a process with this share. The estimate is
    /// `total * share / 100`, rounded down to a multiple of [`Sms::STEP`] as on the hardware, but at
    /// least one step. If a backend has measured a larger minimum number of SMs, it uses that minimum.
    pub fn sms_of(self, total: Sms) -> Sms {
        let exact = u64::from(total.0) * u64::from(self.0) / 100;
        let stepped = exact - exact % u64::from(Sms::STEP);
        let sms = u32::try_from(stepped).expect("at most `total`, which is a u32");
        Sms(sms.max(Sms::STEP).min(total.0))
    }

    /// Returns the smallest share that gives at least `wanted` of `total` SMs. If no share is large
    /// enough, returns 100 %.
    pub fn smallest_for(wanted: Sms, total: Sms) -> Self {
        (1..100).map(Self).find(|percent| percent.sms_of(total) >= wanted).unwrap_or(Self::WHOLE)
    }
}

impl TryFrom<u32> for Percent {
    type Error = InvalidShare;

    fn try_from(percent: u32) -> Result<Self, InvalidShare> {
        Self::new(percent)
    }
}

/// Parses a whole percentage, with or without the `%` sign.
impl FromStr for Percent {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = text.strip_suffix('%').unwrap_or(text).parse::<u32>();
        let number = number
            .map_err(|_| format!("invalid share {text:?}; give a whole percentage, for example 30%"))?;
        Self::new(number).map_err(|error| error.to_string())
    }
}

impl From<Percent> for u32 {
    fn from(percent: Percent) -> Self {
        percent.0
    }
}

impl fmt::Display for Percent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}%", self.0)
    }
}

/// A number of streaming multiprocessors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Sms(pub u32);

impl Sms {
    /// The granularity of MPS shares: the two SMs of a texture processing cluster (TPC).
    pub const STEP: u32 = 2;
}

impl fmt::Display for Sms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} SMs", self.0)
    }
}

/// A point in time, measured from an origin that the caller chooses once. The policy receives
/// timestamps instead of reading a clock, so that a simulation can use virtual time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Timestamp(Duration);

impl Timestamp {
    /// Returns the timestamp at this duration after the origin.
    pub const fn after_origin(since: Duration) -> Self {
        Self(since)
    }

    /// Returns the time since the origin.
    pub const fn since_origin(self) -> Duration {
        self.0
    }

    /// Returns the time from `earlier` until this timestamp. Returns zero if `earlier` is later than
    /// this timestamp.
    pub const fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

impl std::ops::Add<Duration> for Timestamp {
    type Output = Self;

    fn add(self, span: Duration) -> Self {
        Self(self.0.saturating_add(span))
    }
}

/// Subtracts a duration. If the result would be before the origin, the result is the origin.
impl std::ops::Sub<Duration> for Timestamp {
    type Output = Self;

    fn sub(self, span: Duration) -> Self {
        Self(self.0.saturating_sub(span))
    }
}

/// Returns the exact duration in milliseconds. `rounding::ms` rounds for display.
pub fn ms(span: Duration) -> f64 {
    span.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_round_down_to_two_sms_and_never_to_none() {
        let h200 = Sms(132);
        let granted = |percent| Percent::new(percent).unwrap().sms_of(h200).0;
        assert_eq!([1, 2, 10, 25, 30, 50, 75, 100].map(granted), [2, 2, 12, 32, 38, 66, 98, 132]);
    }

    #[test]
    fn a_share_found_for_sms_yields_them() {
        for total in [10, 46, 80, 132, 188] {
            for wanted in (2..=total).step_by(2) {
                let share = Percent::smallest_for(Sms(wanted), Sms(total));
                assert!(share.sms_of(Sms(total)) >= Sms(wanted), "{wanted} of {total}");
            }
        }
    }

    #[test]
    fn only_one_to_a_hundred_is_a_share() {
        assert_eq!(Percent::new(0), Err(InvalidShare(0)));
        assert_eq!(Percent::new(101), Err(InvalidShare(101)));
        assert_eq!(["30", "30%"].map(|text| text.parse().map(Percent::get)), [Ok(30), Ok(30)]);
        for (text, why) in [("101%", "invalid share 101;"), ("x%", "invalid share \"x%\""), ("%", "a whole")]
        {
            let fault = text.parse::<Percent>().unwrap_err();
            assert!(fault.contains(why), "{fault}");
        }
    }
}
