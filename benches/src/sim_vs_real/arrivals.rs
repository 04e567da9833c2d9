//! The arrival times of requests, in files with lines of the form `seconds,model`.
//! `shadowslice-simulate` uses the same format.

use std::time::Duration;

use crate::MeasureError;

/// The time between two decisions of the policy.
pub(crate) const INTERVAL: Duration = Duration::from_millis(500);

/// The time before the first request, in the real run and in the simulated run. In this time, the
/// supervisor starts, and its policy makes its first decisions. The time ends in the middle of an
/// interval, so that both runs have completed the same number of intervals.
pub(crate) const LEAD: Duration = Duration::from_millis(4250);

/// The shifts of the arrivals in the simulated runs, in ms. A supervisor's first interval begins a
/// few ms after its process starts (about 5 ms according to its log). Each simulated run therefore
/// shifts the arrivals by one of these times.
pub(crate) const PHASES_MS: [u64; 11] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10];

/// The arrival of one request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ReplayArrival {
    /// The time of the arrival since the start of the run.
    pub(crate) at: Duration,
    pub(crate) model: String,
}

/// Parses the text of a file.
pub(crate) fn read(text: &str) -> Result<Vec<ReplayArrival>, MeasureError> {
    let arrival = |line: &str| {
        let (seconds, model) = line.split_once(',')?;
        let at = Duration::try_from_secs_f64(seconds.parse().ok()?).ok()?;
        Some(ReplayArrival { at, model: model.to_owned() })
    };
    let lines = text.lines();
    lines
        .map(|line| {
            arrival(line).ok_or_else(|| format!("invalid arrival {line:?}; expected `seconds,model`").into())
        })
        .collect()
}

/// Returns the arrivals as the text of a file.
pub(crate) fn text(arrivals: &[ReplayArrival]) -> String {
    let line = |ReplayArrival { at, model }: &ReplayArrival| {
        format!("{}.{:09},{model}\n", at.as_secs(), at.subsec_nanos())
    };
    arrivals.iter().map(line).collect()
}

/// Returns the arrivals, delayed by `by`.
pub(crate) fn later(arrivals: &[ReplayArrival], by: Duration) -> Vec<ReplayArrival> {
    let moved =
        |ReplayArrival { at, model }: &ReplayArrival| ReplayArrival { at: *at + by, model: model.clone() };
    arrivals.iter().map(moved).collect()
}
