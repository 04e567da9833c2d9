//! The cost of a supervisor without requests.

use std::path::Path;
use std::time::Duration;

use crate::Failure;
use crate::cost_profile::Parts;
use crate::cost_profile::switches::Switches;
use crate::machine::Reading;
use crate::plan::SMALL;
use crate::system::{System, home_under};

const MODELS: usize = 10;

/// A policy that leaves shares alone, and the default, which looks at the models at each interval.
pub(super) const POLICIES: [&str; 2] = ["static", "adaptive"];

/// The time after which the rest of the start is over.
const SETTLE: Duration = Duration::from_secs(3);

/// CPU time and wake-ups of an idle supervisor and its workers.
pub(super) struct Idle {
    pub(super) policy: &'static str,
    pub(super) models: usize,
    pub(super) span: Duration,
    pub(super) cpu: Parts<Duration>,
    pub(super) switches: Parts<u64>,
    pub(super) others_percent: f64,
}

/// Measures it under a policy over `span`.
pub(super) async fn idle(binaries: &Path, policy: &'static str, span: Duration) -> Result<Idle, Failure> {
    eprintln!("idle: {MODELS} models, policy {policy}");
    let sizes: Vec<usize> = (0..MODELS).map(|model| SMALL + 4 * model).collect();
    let system = System::start(home_under(policy, binaries, &sizes, 1)?).await?;
    tokio::time::sleep(SETTLE).await;
    let clocks = system.clocks()?;
    let switches = || (Switches::of(&[system.supervisor()]), Switches::of(&system.workers()));
    let (before, switched) = (Reading::take(&clocks)?, switches());
    tokio::time::sleep(span).await;
    let (used, switched_then) = (Reading::take(&clocks)?.since(&before), switches());
    system.stop().await?;
    Ok(Idle {
        policy,
        models: MODELS,
        span: used.wall,
        cpu: Parts { supervisor: used.server, worker: used.workers },
        switches: Parts {
            supervisor: (switched_then.0 - switched.0).voluntary,
            worker: (switched_then.1 - switched.1).voluntary,
        },
        others_percent: used.others_percent(),
    })
}
