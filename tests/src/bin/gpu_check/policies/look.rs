//! The state of the supervisor and the host between two spans.

use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use serde_json::Value;
use shadowslice_tests::metrics::{self, Metrics};
use tokio::time::Instant;

use super::mix::ModelMix;
use crate::error::StageError;
use crate::numbers::rounded;
use crate::serving::RunningServer;

/// Linux counts processor time in /proc in this unit.
const TICKS_PER_S: f64 = 100.0;

/// What the supervisor and the host have counted up to a moment.
#[derive(Debug)]
pub(super) struct CounterSnapshot {
    at: Instant,
    /// The processor time of all processes of the host, in seconds.
    host_s: f64,
    /// The processor time of this process, in seconds.
    clients_s: f64,
    pub(super) models: Vec<ModelCounters>,
}

/// The supervisor's counts for one model.
#[derive(Debug)]
pub(super) struct ModelCounters {
    /// Requests answered within the SLO.
    within_slo: f64,
    /// Requests that came, and how long that took altogether.
    came: f64,
    coming_s: f64,
    /// Changes of its share, and those of them that were rolled back.
    changes: u64,
    rolled_back: u64,
    share_percent: u32,
}

impl CounterSnapshot {
    /// Asks the supervisor.
    pub(super) async fn take(mix: &ModelMix, serving: &RunningServer) -> Result<Self, StageError> {
        let socket = serving.server.home().run_dir().join("metrics.sock");
        let failed = |source| StageError::Io { what: "ask for the metrics".into(), source };
        let answer = metrics::ask(&socket, "GET", "/metrics").await.map_err(failed)?;
        let metrics = Metrics::parse(&answer.body).map_err(StageError::Unusable)?;
        let status = serving.server.status().await?;
        let seen = |model: &str| {
            let of = |name: &str| {
                let missing =
                    || StageError::Unusable(format!("the supervisor has no metric {name} of {model}"));
                metrics.of(model, name, "").ok_or_else(missing)
            };
            let missing = || StageError::Unusable(format!("the supervisor's status has no model {model}"));
            let status = status.model(model).ok_or_else(missing)?;
            Ok(ModelCounters {
                within_slo: of("requests_within_slo_total")?,
                came: of("request_receive_seconds_count")?,
                coming_s: of("request_receive_seconds_sum")?,
                changes: status.handovers.completed,
                rolled_back: status.handovers.rolled_back,
                share_percent: status.share_percent,
            })
        };
        let models = mix.models.iter().map(|guest| seen(&guest.model)).collect::<Result<_, StageError>>()?;
        Ok(Self { at: Instant::now(), host_s: host_s(), clients_s: own_s(), models })
    }

    /// Adds the cores that were busy since another look, on the whole host and with clients.
    pub(super) fn add_cores(&self, figures: &mut Value, before: &Self) {
        let seconds = (self.at - before.at).as_secs_f64();
        figures["host_cores"] = rounded((self.host_s - before.host_s) / seconds).into();
        figures["client_cores"] = rounded((self.clients_s - before.clients_s) / seconds).into();
    }
}

impl ModelCounters {
    /// Adds what the supervisor counted since another look.
    pub(super) fn add_to(&self, figures: &mut Value, before: &Self, offered: u64) {
        let within = self.within_slo - before.within_slo;
        let came = self.came - before.came;
        figures["counted_within_slo"] = rounded(within / offered.max(1) as f64).into();
        figures["receive_ms"] = rounded((self.coming_s - before.coming_s) / came.max(1.0) * 1e3).into();
        figures["share_changes"] = (self.changes.saturating_sub(before.changes)).into();
        figures["rolled_back"] = (self.rolled_back.saturating_sub(before.rolled_back)).into();
        figures["share_percent"] = self.share_percent.into();
    }
}

/// Returns the processor time of this process in seconds; 0 if the system doesn't say.
fn own_s() -> f64 {
    getrusage(UsageWho::RUSAGE_SELF)
        .map_or(0.0, |usage| (usage.user_time() + usage.system_time()).num_microseconds() as f64 / 1e6)
}

/// Returns the processor time of the whole host in seconds; 0 if the system doesn't say.
fn host_s() -> f64 {
    std::fs::read_to_string("/proc/stat").map_or(0.0, |text| busy_ticks(&text) / TICKS_PER_S)
}

/// Sums up a host's time but for idle time and waits for disks.
fn busy_ticks(stat: &str) -> f64 {
    let fields = stat.lines().next().unwrap_or_default().split_whitespace().skip(1);
    let ticks: Vec<f64> = fields.map_while(|field| field.parse().ok()).collect();
    // The last two are guests' time, which counts as the user's already.
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
