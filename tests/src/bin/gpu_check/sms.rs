//! From percent to SMs, and the costs of contexts: asked of the worker's binary under a private MPS
//! daemon.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::process::Command;

use crate::error::{Error, chain};
use crate::figures::Figures;
use crate::mps::Daemon;
use crate::numbers::{rounded, summary};
use crate::tools::{Device, Setting, output, smi};

/// How long one probe may take.
const PROBE_WITHIN: Duration = Duration::from_secs(30);

/// How long a blank worker may take to load a model and run it once.
const BLANK_WITHIN: Duration = Duration::from_secs(90);

/// The share of a blank worker, in percent.
const BLANK_SHARE: &str = "50";

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

/// The output of `shadowslice-worker --probe green`.
#[derive(Debug, Deserialize)]
struct Green {
    /// The same work without a switch.
    #[serde(default)]
    stay_us: Vec<f64>,
    create_us: Vec<f64>,
    switch_us: Vec<f64>,
}

/// The output of `shadowslice-worker --probe ipc`.
#[derive(Debug, Deserialize)]
struct Ipc {
    open_us: Vec<f64>,
}

/// The output of `shadowslice-worker --probe blank`.
#[derive(Debug, Deserialize)]
struct Blank {
    libraries_ms: f64,
    context_ms: f64,
    session_ms: f64,
    first_run_ms: f64,
    sms: u32,
}

pub(crate) async fn run(setting: &Setting, figures: &mut Figures) -> Result<(), Error> {
    let Device::Gpu(index) = &setting.device else {
        return Err(Error::Unusable("an emulated GPU has no contexts".into()));
    };
    let uuid = smi(setting, index, "uuid").await?;
    let daemon = Daemon::start(setting, &uuid).await?;
    // The server's own memory belongs to no client.
    let idle = smi(setting, index, "memory.used").await?.parse::<f64>().ok();
    let mut faults = Vec::new();
    let mut note = |what: &str, result: Result<(), Error>| {
        if let Err(error) = result {
            faults.push(format!("{what}: {}", chain(&error)));
        }
    };
    note("shares", shares(setting, &daemon, figures, idle).await);
    figures.save()?;
    note("green contexts", green(setting, &daemon, figures).await);
    note("shared memory", ipc(setting, &daemon, figures).await);
    for model in &setting.models {
        let path = model.path.to_string_lossy();
        let asked =
            probe::<Blank>(setting, &daemon, &["blank", &path, BLANK_SHARE], None, BLANK_WITHIN).await;
        note(&format!("blank {}", model.name), asked.map(|blank| blank.into_figures(figures, &model.name)));
    }
    figures.save()?;
    daemon.stop().await?;
    if faults.is_empty() { Ok(()) } else { Err(Error::Unusable(faults.join("; "))) }
}

/// Asks the worker's binary, as a client of the daemon.
async fn probe<T: DeserializeOwned>(
    setting: &Setting,
    daemon: &Daemon,
    arguments: &[&str],
    percent: Option<u32>,
    within: Duration,
) -> Result<T, Error> {
    let mut command = Command::new(setting.worker());
    daemon.serve(&mut command);
    command.arg("--probe").args(arguments);
    if let Some(percent) = percent {
        command.env("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", percent.to_string());
    }
    let said = output(command, within, &setting.log("probe")).await?;
    let line = said.lines().rfind(|line| line.starts_with('{')).unwrap_or(&said);
    serde_json::from_str(line)
        .map_err(|source| Error::Json { what: format!("what the probe printed, {line:?},"), source })
}

async fn shares(
    setting: &Setting,
    daemon: &Daemon,
    figures: &mut Figures,
    idle_mib: Option<f64>,
) -> Result<(), Error> {
    let step = if setting.quick { 10 } else { 1 };
    let (mut sms, mut memory) = (BTreeMap::new(), BTreeMap::new());
    let (mut init, mut context) = (Vec::new(), Vec::new());
    for percent in (1..=100).filter(|percent| percent % step == 0 || [1, 100].contains(percent)) {
        let said: Probe = probe(setting, daemon, &[], Some(percent), PROBE_WITHIN).await?;
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

async fn green(setting: &Setting, daemon: &Daemon, figures: &mut Figures) -> Result<(), Error> {
    let Green { create_us, switch_us, stay_us } =
        probe(setting, daemon, &["green"], None, PROBE_WITHIN).await?;
    let figure =
        json!({ "create": summary(&create_us), "switch": summary(&switch_us), "stay": summary(&stay_us) });
    figures.set(&["green_context_us"], figure);
    Ok(())
}

async fn ipc(setting: &Setting, daemon: &Daemon, figures: &mut Figures) -> Result<(), Error> {
    let Ipc { open_us } = probe(setting, daemon, &["ipc"], None, PROBE_WITHIN).await?;
    figures.set(&["ipc_open_us"], summary(&open_us));
    Ok(())
}

impl Blank {
    /// The time that is left once the libraries are there.
    fn into_figures(self, figures: &mut Figures, model: &str) {
        let Self { libraries_ms, context_ms, session_ms, first_run_ms, sms } = self;
        let whole = rounded(context_ms + session_ms + first_run_ms);
        figures.set(&["handover_ms", model, "blank"], whole);
        let parts: Value = json!({ "libraries": rounded(libraries_ms), "context": rounded(context_ms),
            "session": rounded(session_ms), "first_run": rounded(first_run_ms), "sms": sms });
        figures.set(&["blank_ms", model], parts);
    }
}
