//! An open-loop client in Python, which runs in its own process.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use serde::Deserialize;
use shadowslice_tests::load::{LoadPlan, LoadTally};
use tokio::process::Command;
use tokio::time::timeout;

use crate::error::StageError;

const SCRIPT: &str = include_str!("../../../python/ask.py");

/// The time that the client may take in addition to the planned time. In that time it prepares its
/// requests and waits for the last answers.
const EXTRA_TIME: Duration = Duration::from_secs(60);

/// The output of the client, with times in microseconds since the start.
#[derive(Debug, Deserialize)]
struct PythonClientReport {
    /// The planned time and the latency of each answered request.
    answered: Vec<(u64, u64)>,
    /// The planned time of each failed request, and the reason.
    failed: Vec<(u64, String)>,
    /// The planned time of each request, and the delay with which it was sent.
    sent_late: Vec<(u64, u64)>,
}

impl PythonClientReport {
    /// Returns two tallies: one of the requests that were due up to `split`, and one of the
    /// remaining requests.
    fn tallies(self, split: Duration) -> [LoadTally; 2] {
        let mut tallies = [LoadTally::default(), LoadTally::default()];
        let part = |due: u64| usize::from(Duration::from_micros(due) >= split);
        for (due, took) in self.answered {
            let tally = &mut tallies[part(due)];
            tally.right += 1;
            tally.latency_us.saturating_record(took);
        }
        for (due, why) in self.failed {
            *tallies[part(due)].failed.entry(why).or_default() += 1;
        }
        for (due, late) in self.sent_late {
            let tally = &mut tallies[part(due)];
            tally.offered += 1;
            tally.late_us.saturating_record(late);
        }
        tallies
    }
}

/// Runs an open-loop load over HTTP. Returns two tallies: one of the requests that were due up to
/// `split`, and one of the remaining requests. Does not check answers.
pub(crate) async fn load_open_loop(
    socket: &Path,
    model: &str,
    plan: &LoadPlan,
    split: Duration,
) -> Result<[LoadTally; 2], StageError> {
    let failed = |source| StageError::Io { what: format!("run a Python client of {model}"), source };
    let timed_out = |_| StageError::Unusable(format!("the Python client of {model} timed out"));
    let client = Command::new(std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into()))
        .args(["-c", SCRIPT])
        .arg(socket)
        .args([model, &plan.rate.to_string(), &plan.span.as_secs_f64().to_string(), &plan.seed.to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(failed)?;
    let result = timeout(plan.span + EXTRA_TIME, client.wait_with_output());
    let output = result.await.map_err(timed_out)?.map_err(failed)?;
    let report: PythonClientReport = serde_json::from_slice(&output.stdout).map_err(|error| {
        StageError::Unusable(format!("the Python client of {model} exited with {}: {error}", output.status))
    })?;
    Ok(report.tallies(split))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_count_in_the_part_of_their_planned_time() {
        let text = r#"{"answered": [[5, 100], [3000000, 200]], "failed": [[2999999, "503"]],
                       "sent_late": [[5, 1], [2999999, 2], [3000000, 3]]}"#;
        let [first, then] =
            serde_json::from_str::<PythonClientReport>(text).unwrap().tallies(Duration::from_secs(3));
        assert_eq!((first.offered, first.right, first.failures()), (2, 1, 1));
        assert_eq!((then.offered, then.right, then.failures()), (1, 1, 0));
        assert_eq!((first.latency_ms(1.0), then.sent_late_ms(1.0)), (0.1, 0.003));
    }
}
