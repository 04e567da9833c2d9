//! The cost of a supervisor that receives no requests.

use std::path::Path;
use std::time::Duration;

use crate::MeasureError;
use crate::cost_profile::PerProcess;
use crate::cost_profile::context_switches::ContextSwitches;
use crate::machine::CpuReading;
use crate::plan::SMALL;
use crate::system::{RunningSupervisor, home_under};

const MODELS: usize = 10;

/// The policies to measure: `static`, which never changes shares, and the default policy, which
/// makes a decision in each interval.
pub(super) const POLICIES: [&str; 2] = ["static", "adaptive"];

/// The time before the measurement starts, in which the supervisor and the workers finish starting.
const SETTLE_TIME: Duration = Duration::from_secs(3);

/// The CPU time and the voluntary context switches of an idle supervisor and of its workers.
pub(super) struct IdleCost {
    pub(super) policy: &'static str,
    pub(super) models: usize,
    pub(super) span: Duration,
    pub(super) cpu: PerProcess<Duration>,
    pub(super) switches: PerProcess<u64>,
    pub(super) others_percent: f64,
}

/// Measures an idle supervisor with this policy for `span`.
pub(super) async fn idle(
    binaries: &Path,
    policy: &'static str,
    span: Duration,
) -> Result<IdleCost, MeasureError> {
    eprintln!("idle: {MODELS} models, policy {policy}");
    let sizes: Vec<usize> = (0..MODELS).map(|model| SMALL + 4 * model).collect();
    let system = RunningSupervisor::start(home_under(policy, binaries, &sizes, 1)?).await?;
    tokio::time::sleep(SETTLE_TIME).await;
    let clocks = system.clocks()?;
    let switches = || (ContextSwitches::of(&[system.supervisor()]), ContextSwitches::of(&system.workers()));
    let (before, switched) = (CpuReading::take(&clocks)?, switches());
    tokio::time::sleep(span).await;
    let (used, switched_then) = (CpuReading::take(&clocks)?.since(&before), switches());
    system.stop().await?;
    Ok(IdleCost {
        policy,
        models: MODELS,
        span: used.wall,
        cpu: PerProcess { supervisor: used.server, worker: used.workers },
        switches: PerProcess {
            supervisor: (switched_then.0 - switched.0).voluntary,
            worker: (switched_then.1 - switched.1).voluntary,
        },
        others_percent: used.others_percent(),
    })
}
