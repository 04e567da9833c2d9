//! The rates that operators and load balancers see, computed from the recorder of a model's requests.

use serde::{Deserialize, Serialize};
use shadowslice_policy::scheduler::{TrafficCounts, TrafficWindow};

/// The number of requests that ended per second in the last ten seconds. Requests that count as
/// `invalid` are not included. `status`, `plan`, `top` and the web page show these rates.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Rates {
    /// The period that the rates cover: 10 s plus the current second, or less after a start.
    pub window_s: f64,
    /// The rate of all requests, including refused requests.
    pub requests: f64,
    pub refused: f64,
    pub failed: f64,
}

impl From<TrafficWindow> for Rates {
    fn from(recent: TrafficWindow) -> Self {
        Self {
            window_s: recent.span.as_secs_f64(),
            requests: recent.rate(recent.counts.ended()),
            refused: recent.rate(recent.counts.refused),
            failed: recent.rate(recent.counts.failed),
        }
    }
}

/// The load of a model in the last full second, which responses report to load balancers. All
/// values are zero if no request ended in that second.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ModelLoad {
    /// The mean latency divided by the SLO. A value above 1 means that requests are late on
    /// average.
    pub utilisation: f64,
    /// The number of requests answered per second.
    pub rate: f64,
    /// The number of requests refused or failed per second.
    pub errors: f64,
}

impl ModelLoad {
    pub(crate) fn of(second: TrafficCounts) -> Self {
        Self {
            utilisation: second.slo_parts / second.answered.max(1) as f64,
            rate: second.answered as f64,
            errors: (second.refused + second.failed) as f64,
        }
    }
}
