//! Snapshots of the counters of the supervisor and the host between two spans.

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use serde_json::Value;
use shadowslice_tests::metrics::{self, Metrics};
use tokio::time::Instant;

use super::mix::ModelMix;
use crate::error::StageError;
use crate::numbers::rounded;
use crate::serving::RunningServer;

/// The number of ticks per second. Ticks are the unit of CPU time in /proc.
const TICKS_PER_S: f64 = 100.0;

/// A snapshot of the counters of the supervisor and the host.
#[derive(Debug)]
pub(super) struct CounterSnapshot {
    at: Instant,
    /// The CPU time of all processes of the host, in seconds.
    host_s: f64,
    /// The CPU time of this process, in seconds.
    clients_s: f64,
    pub(super) models: Vec<ModelCounters>,
}

/// The supervisor's counters for one model.
#[derive(Debug)]
pub(super) struct ModelCounters {
    /// The number of requests answered within the SLO.
    within_slo: f64,
    /// The number of received requests.
    received: f64,
    /// The total time to receive these requests, in seconds.
    receive_s: f64,
    /// The number of changes of the share.
    changes: u64,
    /// The number of changes that were rolled back.
    rolled_back: u64,
    share_percent: u32,
}

impl CounterSnapshot {
    /// Reads the counters from the supervisor and from /proc.
    pub(super) async fn take(mix: &ModelMix, serving: &RunningServer) -> Result<Self, StageError> {
        let socket = serving.server.home().run_dir().join("metrics.sock");
        let failed = |source| StageError::Io { what: "read the metrics".into(), source };
        let response = metrics::ask(&socket, "GET", "/metrics").await.map_err(failed)?;
        let metrics = Metrics::parse(&response.body).map_err(StageError::Unusable)?;
        let status = serving.server.status().await?;
        let counters = |model: &str| {
            let of = |name: &str| {
                let missing =
                    || StageError::Unusable(format!("the supervisor has no metric {name} of {model}"));
                metrics.of(model, name, "").ok_or_else(missing)
            };
            let missing = || StageError::Unusable(format!("the supervisor's status has no model {model}"));
            let status = status.model(model).ok_or_else(missing)?;
            Ok(ModelCounters {
                within_slo: of("requests_within_slo_total")?,
                received: of("request_receive_seconds_count")?,
                receive_s: of("request_receive_seconds_sum")?,
                changes: status.handovers.completed,
                rolled_back: status.handovers.rolled_back,
                share_percent: status.share_percent,
            })
        };
        let models =
            mix.models.iter().map(|guest| counters(&guest.model)).collect::<Result<_, StageError>>()?;
        Ok(Self { at: Instant::now(), host_s: host_s(), clients_s: own_s(), models })
    }

    /// Adds the mean number of busy cores since an earlier snapshot, for the whole host and for the
    /// clients.
    pub(super) fn add_cores(&self, figures: &mut Value, before: &Self) {
        let seconds = (self.at - before.at).as_secs_f64();
        figures["host_cores"] = rounded((self.host_s - before.host_s) / seconds).into();
        figures["client_cores"] = rounded((self.clients_s - before.clients_s) / seconds).into();
    }
}

impl ModelCounters {
    /// Adds the differences from an earlier snapshot.
    pub(super) fn add_to(&self, figures: &mut Value, before: &Self, offered: u64) {
        let within = self.within_slo - before.within_slo;
        let received = self.received - before.received;
        figures["counted_within_slo"] = rounded(within / offered.max(1) as f64).into();
        figures["receive_ms"] = rounded((self.receive_s - before.receive_s) / received.max(1.0) * 1e3).into();
        figures["share_changes"] = (self.changes.saturating_sub(before.changes)).into();
        figures["rolled_back"] = (self.rolled_back.saturating_sub(before.rolled_back)).into();
        figures["share_percent"] = self.share_percent.into();
    }
}

/// Returns the CPU time of this process in seconds, or 0 if the system does not report it.
fn own_s() -> f64 {
    getrusage(UsageWho::RUSAGE_SELF)
        .map_or(0.0, |usage| (usage.user_time() + usage.system_time()).num_microseconds() as f64 / 1e6)
}

/// Returns the CPU time of the whole host in seconds, or 0 if the system does not report it.
fn host_s() -> f64 {
    std::fs::read_to_string("/proc/stat").map_or(0.0, |text| busy_ticks(&text) / TICKS_PER_S)
}

/// Returns the CPU time of a host in ticks, without idle time and I/O wait. `stat` is the content
/// of /proc/stat.
fn busy_ticks(stat: &str) -> f64 {
    let fields = stat.lines().next().unwrap_or_default().split_whitespace().skip(1);
    let ticks: Vec<f64> = fields.map_while(|field| field.parse().ok()).collect();
    // The last two fields are the CPU time of virtual machines, which the user time already
    // includes.
    ticks.iter().take(8).enumerate().filter(|(n, _)| !matches!(n, 3 | 4)).map(|(_, ticks)| ticks).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn idle_time_is_not_busy() {
        assert_eq!(busy_ticks("cpu  10 1 5 1000 50 0 2 3 7 7\ncpu0 1 1 1 1\n"), 21.0);
        assert_eq!(busy_ticks(""), 0.0);
        assert!(host_s() > 0.0 && own_s() > 0.0);
    }
}
