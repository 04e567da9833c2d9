//! From percent to SMs, and the costs of contexts: asked of the worker's binary under a private MPS
//! daemon.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;
use serde_json::json;
use tokio::process::Command;

use crate::error::StageError;
use crate::figures::FigureStore;
use crate::mps::PrivateMpsDaemon;
use crate::numbers::summary;
use crate::tools::{CheckSettings, CheckedDevice, output, smi};

/// How long one probe may take.
const PROBE_WITHIN: Duration = Duration::from_secs(30);

/// The output of `shadowslice-worker --probe`.
#[derive(Debug, Deserialize)]
struct Probe {
    sms: u32,
    /// Part of `context_ms` where it is not told apart.
    init_ms: Option<f64>,
    context_ms: f64,
    memory_free: u64,
    memory_total: u64,
}

pub(crate) async fn run(setting: &CheckSettings, figures: &mut FigureStore) -> Result<(), StageError> {
    let CheckedDevice::Gpu(index) = &setting.device else {
        return Err(StageError::Unusable("an emulated GPU has no contexts".into()));
    };
    let uuid = smi(setting, index, "uuid").await?;
    let daemon = PrivateMpsDaemon::start(setting, &uuid).await?;
    // The server's own memory belongs to no client.
    let idle = smi(setting, index, "memory.used").await?.parse::<f64>().ok();
    let outcome = shares(setting, &daemon, figures, idle).await;
    figures.save()?;
    daemon.stop().await?;
    outcome
}

/// Asks the worker's binary, as a client of the daemon.
async fn probe(
    setting: &CheckSettings,
    daemon: &PrivateMpsDaemon,
    percent: u32,
) -> Result<Probe, StageError> {
    let mut command = Command::new(setting.worker());
    daemon.serve(&mut command);
    command.arg("--probe").env("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", percent.to_string());
    let said = output(command, PROBE_WITHIN, &setting.log("probe")).await?;
    let line = said.lines().rfind(|line| line.starts_with('{')).unwrap_or(&said);
    serde_json::from_str(line)
        .map_err(|source| StageError::Json { what: format!("what the probe printed, {line:?},"), source })
}

async fn shares(
    setting: &CheckSettings,
    daemon: &PrivateMpsDaemon,
    figures: &mut FigureStore,
    idle_mib: Option<f64>,
) -> Result<(), StageError> {
    let step = if setting.quick { 10 } else { 1 };
    let (mut sms, mut memory) = (BTreeMap::new(), BTreeMap::new());
    let (mut init, mut context) = (Vec::new(), Vec::new());
    for percent in (1..=100).filter(|percent| percent % step == 0 || [1, 100].contains(percent)) {
        let said = probe(setting, daemon, percent).await?;
        let used = said.memory_total.saturating_sub(said.memory_free) as f64 / f64::from(1 << 20);
        let percent = percent.to_string();
        sms.insert(percent.clone(), said.sms);
        memory.insert(percent, idle_mib.map(|idle| (used - idle).round()));
        init.extend(said.init_ms);
        context.push(said.context_ms);
    }
    figures.set(&["sms_by_percent"], json!(sms));
    figures.set(&["context_memory_mib"], json!(memory));
    figures.set(&["context_ms"], json!({ "init": summary(&init), "context": summary(&context) }));
    Ok(())
}
