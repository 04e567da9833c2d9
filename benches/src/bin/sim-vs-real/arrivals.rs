//! Which request comes when: files of `seconds,model`, as `shadowslice-simulate` writes and reads them.

use std::time::Duration;

use shadowslice_benches::MeasureError;

/// How often the policy decides.
pub(crate) const INTERVAL: Duration = Duration::from_millis(500);

/// The time before the first request. A supervisor has been ready for a while when requests come,
/// and its policy has been asked; so the real and the simulated run both begin with as long a time
/// without requests. It ends in the middle of an interval, so that the same number of intervals is
/// over on both sides.
pub(crate) const LEAD: Duration = Duration::from_millis(4250);

/// A supervisor's first interval begins some ms after its process, about five by its log; so the
/// simulated run begins this much earlier, for the same arrivals.
pub(crate) const PHASES_MS: [u64; 11] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10];

/// One request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ReplayArrival {
    /// When it comes, after the start of the simulated world.
    pub(crate) at: Duration,
    /// For which model.
    pub(crate) model: String,
}

/// Reads a file's text.
pub(crate) fn read(text: &str) -> Result<Vec<ReplayArrival>, MeasureError> {
    let arrival = |line: &str| {
        let (seconds, model) = line.split_once(',')?;
        let at = Duration::try_from_secs_f64(seconds.parse().ok()?).ok()?;
        Some(ReplayArrival { at, model: model.to_owned() })
    };
    let lines = text.lines();
    lines.map(|line| arrival(line).ok_or_else(|| format!("{line:?} is no arrival").into())).collect()
}

/// The text of a file that holds these.
pub(crate) fn text(arrivals: &[ReplayArrival]) -> String {
    let line = |ReplayArrival { at, model }: &ReplayArrival| {
        format!("{}.{:09},{model}\n", at.as_secs(), at.subsec_nanos())
    };
    arrivals.iter().map(line).collect()
}

/// The same, so much later.
pub(crate) fn later(arrivals: &[ReplayArrival], by: Duration) -> Vec<ReplayArrival> {
    let moved =
        |ReplayArrival { at, model }: &ReplayArrival| ReplayArrival { at: *at + by, model: model.clone() };
    arrivals.iter().map(moved).collect()
}
