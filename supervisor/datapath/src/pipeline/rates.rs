//! The request rates of the last ten seconds. `status`, `plan`, `top` and the web page show these
//! rates.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use shadowslice_shared::units::Timestamp;

/// The number of full seconds that the rates cover, in addition to the current second.
const SECONDS: usize = 10;

/// The shortest period over which a rate is calculated, in seconds.
const SHORTEST_S: f64 = 1.0;

/// The number of requests that ended per second. Requests that count as `invalid` are not included.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Rates {
    /// The period that the rates cover: 10 s plus the current second, or less after a start.
    pub window_s: f64,
    /// The rate of all requests, including refused requests.
    pub requests: f64,
    pub refused: f64,
    pub failed: f64,
}

/// The way in which a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Refused,
    Failed,
    /// The request was answered, or its client disconnected.
    Other,
}

#[derive(Debug, Clone, Copy, Default)]
struct Second {
    requests: u32,
    refused: u32,
    failed: u32,
}

#[derive(Debug)]
pub(super) struct RateMeter {
    began: Timestamp,
    /// The number of the current second, counted from `began`.
    now: u64,
    /// A ring buffer with one element per second.
    seconds: [Second; SECONDS + 1],
}

impl RateMeter {
    pub(super) fn new(began: Timestamp) -> Self {
        Self { began, now: 0, seconds: Default::default() }
    }

    pub(super) fn count(&mut self, end: End, at: Timestamp) {
        let second = self.second(at);
        second.requests = second.requests.saturating_add(1);
        match end {
            End::Refused => second.refused = second.refused.saturating_add(1),
            End::Failed => second.failed = second.failed.saturating_add(1),
            End::Other => {}
        }
    }

    pub(super) fn rates(&mut self, at: Timestamp) -> Rates {
        self.second(at);
        let age = at.since(self.began);
        let whole = self.now.saturating_sub(SECONDS as u64);
        let window_s = (age.saturating_sub(Duration::from_secs(whole))).as_secs_f64();
        let each_second = |of: fn(&Second) -> u32| {
            let sum: u64 = self.seconds.iter().map(|second| u64::from(of(second))).sum();
            sum as f64 / window_s.max(SHORTEST_S)
        };
        Rates {
            window_s,
            requests: each_second(|second| second.requests),
            refused: each_second(|second| second.refused),
            failed: each_second(|second| second.failed),
        }
    }

    /// Returns the element for the current second, and clears elements that are too old.
    fn second(&mut self, at: Timestamp) -> &mut Second {
        let now = at.since(self.began).as_secs().max(self.now);
        let size = self.seconds.len() as u64;
        for passed in (self.now + 1..=now).rev().take(self.seconds.len()) {
            self.seconds[(passed % size) as usize] = Second::default();
        }
        self.now = now;
        &mut self.seconds[(now % size) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Timestamp {
        Timestamp::after_origin(Duration::from_millis(ms))
    }

    #[test]
    fn rates_cover_ten_seconds_and_the_one_that_has_begun() {
        let mut meter = RateMeter::new(at(0));
        assert_eq!(meter.rates(at(0)), Rates::default());
        (0..200).for_each(|n| meter.count(End::Other, at(n * 100)));
        let rates = meter.rates(at(19_950));
        assert!((rates.window_s - 10.95).abs() < 1e-9, "{rates:?}");
        assert!((rates.requests - 110.0 / 10.95).abs() < 1e-9, "{rates:?}");
        assert_eq!(meter.rates(at(40_000)).requests, 0.0);
    }

    #[test]
    fn after_a_start_they_cover_less() {
        let mut meter = RateMeter::new(at(0));
        for end in [End::Refused, End::Failed, End::Other, End::Other] {
            meter.count(end, at(100));
        }
        let expected = Rates { window_s: 0.5, requests: 4.0, refused: 1.0, failed: 1.0 };
        assert_eq!(meter.rates(at(500)), expected);
        assert_eq!(meter.rates(at(2_000)).requests, 2.0);
    }
}
