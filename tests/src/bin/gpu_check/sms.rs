//! The stage `sms`, which measures the number of SMs by percentage and the cost of contexts. It
//! runs the worker's binary under a private MPS daemon.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;
use serde_json::json;
use tokio::process::Command;

use crate::error::StageError;
use crate::figures::FigureStore;
use crate::mps::PrivateMpsDaemon;
use crate::numbers::summary;
use crate::tools::{CheckSettings, CheckedDevice, output, query_gpu};

/// The time limit of one probe.
const PROBE_TIMEOUT: Duration = Duration::from_secs(30);

/// The output of `shadowslice-worker --probe`.
#[derive(Debug, Deserialize)]
struct Probe {
    sms: u32,
    /// The time to initialise CUDA, or `None` if `context_ms` includes that time.
    init_ms: Option<f64>,
    context_ms: f64,
    memory_free: u64,
    memory_total: u64,
}

pub(crate) async fn run(settings: &CheckSettings, figures: &mut FigureStore) -> Result<(), StageError> {
    let CheckedDevice::Gpu(index) = &settings.device else {
        return Err(StageError::Unusable("an emulated GPU has no contexts".into()));
    };
    let uuid = query_gpu(settings, index, "uuid").await?;
    let daemon = PrivateMpsDaemon::start(settings, &uuid).await?;
    // The MPS server uses GPU memory too. That memory is subtracted from the memory of the probes.
    let idle = query_gpu(settings, index, "memory.used").await?.parse::<f64>().ok();
    let outcome = shares(settings, &daemon, figures, idle).await;
    figures.save()?;
    daemon.stop().await?;
    outcome
}

/// Runs the worker's probe as a client of the daemon.
async fn probe(
    settings: &CheckSettings,
    daemon: &PrivateMpsDaemon,
    percent: u32,
) -> Result<Probe, StageError> {
    let mut command = Command::new(settings.worker());
    daemon.configure_client(&mut command);
    command.arg("--probe").env("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", percent.to_string());
    let text = output(command, PROBE_TIMEOUT, &settings.log("probe")).await?;
    let line = text.lines().rfind(|line| line.starts_with('{')).unwrap_or(&text);
    serde_json::from_str(line)
        .map_err(|source| StageError::Json { what: format!("the output of the probe, {line:?},"), source })
}

async fn shares(
    settings: &CheckSettings,
    daemon: &PrivateMpsDaemon,
    figures: &mut FigureStore,
    idle_mib: Option<f64>,
) -> Result<(), StageError> {
    let step = if settings.quick { 10 } else { 1 };
    let (mut sms, mut memory) = (BTreeMap::new(), BTreeMap::new());
    let (mut init, mut context) = (Vec::new(), Vec::new());
    for percent in (1..=100).filter(|percent| percent % step == 0 || [1, 100].contains(percent)) {
        let probe = probe(settings, daemon, percent).await?;
        let used = probe.memory_total.saturating_sub(probe.memory_free) as f64 / f64::from(1 << 20);
        let percent = percent.to_string();
        sms.insert(percent.clone(), probe.sms);
        memory.insert(percent, idle_mib.map(|idle| (used - idle).round()));
        init.extend(probe.init_ms);
        context.push(probe.context_ms);
    }
    figures.set(&["sms_by_percent"], json!(sms));
    figures.set(&["context_memory_mib"], json!(memory));
    figures.set(&["context_ms"], json!({ "init": summary(&init), "context": summary(&context) }));
    Ok(())
}
