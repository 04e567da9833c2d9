//! A client in Python, in a process of its own.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use serde::Deserialize;
use shadowslice_tests::load::{LoadPlan, LoadTally};
use tokio::process::Command;
use tokio::time::timeout;

use crate::error::StageError;

const SCRIPT: &str = include_str!("../../../python/ask.py");

/// How long the client may take beyond the planned time: to make its requests, and for its last
/// answers.
const ENDS_WITHIN: Duration = Duration::from_secs(60);

#[derive(Debug, Deserialize)]
struct PythonClientReport {
    /// When each answered request was due since the start, and how long it took, in microseconds.
    answered: Vec<(u64, u64)>,
    /// When each failed request was due, in microseconds, and why it failed.
    failed: Vec<(u64, String)>,
    /// When each request was due, and how late it was sent, in microseconds.
    sent_late: Vec<(u64, u64)>,
}

impl PythonClientReport {
    /// Returns the tallies of the requests that were due up to `split`, and of the rest.
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

/// Sends the planned requests at random times, answered or not, over HTTP, and returns the tallies
/// of those due up to `split` and of the rest. Answers are not checked.
pub(crate) async fn ask_at_random(
    socket: &Path,
    model: &str,
    plan: &LoadPlan,
    split: Duration,
) -> Result<[LoadTally; 2], StageError> {
    let failed = |source| StageError::Io { what: format!("run a client of {model} in Python"), source };
    let late = |_| StageError::Unusable(format!("a client of {model} in Python did not end in time"));
    let client = Command::new(std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into()))
        .args(["-c", SCRIPT])
        .arg(socket)
        .args([model, &plan.rate.to_string(), &plan.span.as_secs_f64().to_string(), &plan.seed.to_string()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(failed)?;
    let ended = timeout(plan.span + ENDS_WITHIN, client.wait_with_output());
    let ended = ended.await.map_err(late)?.map_err(failed)?;
    let asked: PythonClientReport = serde_json::from_slice(&ended.stdout).map_err(|error| {
        StageError::Unusable(format!("a client of {model} in Python ended with {}: {error}", ended.status))
    })?;
    Ok(asked.tallies(split))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_count_where_they_were_due() {
        let text = r#"{"answered": [[5, 100], [3000000, 200]], "failed": [[2999999, "503"]],
                       "sent_late": [[5, 1], [2999999, 2], [3000000, 3]]}"#;
        let [first, then] =
            serde_json::from_str::<PythonClientReport>(text).unwrap().tallies(Duration::from_secs(3));
        assert_eq!((first.offered, first.right, first.failures()), (2, 1, 1));
        assert_eq!((then.offered, then.right, then.failures()), (1, 1, 0));
        assert_eq!((first.latency_ms(1.0), then.sent_late_ms(1.0)), (0.1, 0.003));
    }
}
