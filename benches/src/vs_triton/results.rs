//! The results of the rounds of cases.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::closed_loop::RoundResult;

/// The result of one round of a case.
#[derive(Debug, Clone, Serialize)]
#[serde(untagged)]
pub(crate) enum CaseResult {
    /// The result of a closed loop.
    Load(RoundResult),
    /// The result of Triton's Python client.
    Python(PythonClientResult),
    /// The result of a closed loop during a change to a model.
    Change(ChangeResult),
}

/// The figures of one round with Triton's gRPC client for Python.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) struct PythonClientResult {
    pub(crate) requests: u64,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
}

/// The outcomes of the requests that ended after the start of a change.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct ChangeResult {
    pub(crate) answered: u64,
    pub(crate) failed: u64,
    /// The longest latency of a request, in ms. Failed requests are included.
    pub(crate) longest_ms: f64,
    /// The time until the server reported that the change was complete, in ms. After a kill, the
    /// value is about zero.
    pub(crate) change_ms: f64,
    /// True if the model answers at the end of the round without manual intervention.
    pub(crate) serves: bool,
    /// The error of the first request that failed.
    pub(crate) first_failure: Option<String>,
}

/// A measurement in which shadowslice and Triton are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Figure {
    P50Us,
    ServerCpuUs,
    PerSecond,
    LongestMs,
    Failed,
}

impl Figure {
    /// Returns this figure of a round, or `None` if this kind of round does not measure the figure.
    pub(crate) fn of(self, measured: &CaseResult) -> Option<f64> {
        match (self, measured) {
            (Self::P50Us, CaseResult::Load(round)) => Some(round.p50_us),
            (Self::P50Us, CaseResult::Python(client)) => Some(client.p50_us),
            (Self::ServerCpuUs, CaseResult::Load(round)) => Some(round.server_cpu_us()),
            (Self::PerSecond, CaseResult::Load(round)) => Some(round.requests_per_second),
            (Self::LongestMs, CaseResult::Change(after)) => Some(after.longest_ms),
            (Self::Failed, CaseResult::Change(after)) => Some(after.failed as f64),
            _ => None,
        }
    }

    /// Returns the name of the figure, with its unit.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::P50Us => "p50, us",
            Self::ServerCpuUs => "server CPU per request, us",
            Self::PerSecond => "requests/s",
            Self::LongestMs => "longest request, ms",
            Self::Failed => "failed requests",
        }
    }
}

impl CaseResult {
    /// Returns true if other programs used at most 10 % of the host's CPU time, or if this CPU time
    /// was not measured.
    pub(crate) fn is_quiet(&self) -> bool {
        match self {
            Self::Load(round) => round.is_quiet(),
            Self::Python(_) | Self::Change(_) => true,
        }
    }
}

impl fmt::Display for CaseResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Load(round) => write!(
                f,
                "{:.0}/s, p50 {:.0} us, server CPU {:.1} us, others {:.0} %",
                round.requests_per_second,
                round.p50_us,
                round.server_cpu_us(),
                round.others_percent
            ),
            Self::Python(client) => write!(f, "{} requests, p50 {:.0} us", client.requests, client.p50_us),
            Self::Change(after) => write!(
                f,
                "{} answered, {} failed, longest {:.1} ms, change took {:.0} ms, serves: {}",
                after.answered, after.failed, after.longest_ms, after.change_ms, after.serves
            ),
        }
    }
}
