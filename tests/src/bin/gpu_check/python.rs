//! A client in Python, in a process of its own.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use serde::Deserialize;
use shadowslice_tests::load::{Plan, Tally};
use tokio::process::Command;
use tokio::time::timeout;

use crate::error::Error;

const SCRIPT: &str = include_str!("../../../python/ask.py");

/// How long the client may take beyond the planned time: to make its requests, and for its last
/// answers.
const ENDS_WITHIN: Duration = Duration::from_secs(60);

#[derive(Debug, Deserialize)]
struct Asked {
    offered: u64,
    took_us: Vec<u64>,
    failed: BTreeMap<String, u64>,
    sent_late_us: u64,
}

/// The planned requests come at random times, answered or not, over HTTP. Answers are not checked.
pub(crate) async fn ask_at_random(socket: &Path, model: &str, plan: &Plan) -> Result<Tally, Error> {
    let failed = |source| Error::Io { what: format!("run a client of {model} in Python"), source };
    let late = |_| Error::Unusable(format!("a client of {model} in Python did not end in time"));
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
    let asked: Asked = serde_json::from_slice(&ended.stdout).map_err(|error| {
        Error::Unusable(format!("a client of {model} in Python ended with {}: {error}", ended.status))
    })?;
    let mut tally = Tally { offered: asked.offered, failed: asked.failed, ..Tally::default() };
    tally.right = asked.took_us.len() as u64;
    tally.sent_late = Duration::from_micros(asked.sent_late_us);
    for took in asked.took_us {
        tally.latency_us.saturating_record(took);
    }
    Ok(tally)
}
