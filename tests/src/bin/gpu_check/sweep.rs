//! The stage `sweep`, which runs each model alone at each share. It measures execution times by
//! batch size as a profile, GPU memory, and errors of the answers.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use serde_json::{Value, json};
use shadowslice_tests::status::WorkerStatusJson;
use tokio::process::Command;

use crate::error::StageError;
use crate::figures::FigureStore;
use crate::models::MeasuredModel;
use crate::numbers::{median, rounded};
use crate::pairs::execution_ms;
use crate::profiles::{memory, source};
use crate::serving::{RunningServer, ServingOptions};
use crate::stages::CheckStage;
use crate::tools::{CheckSettings, CheckedDevice, output};
use crate::traffic::{Saturation, TestedModel};

/// The measured shares, in percent. The worker starts with the first share.
const SHARES: [u32; 8] = [100, 80, 60, 45, 30, 20, 12, 6];

/// The shares of a quick run, in percent.
const QUICK_SHARES: [u32; 3] = [100, 30, 12];

/// The batch sizes, in rows.
const BATCHES: [u32; 6] = [1, 2, 4, 8, 16, 32];

/// The share whose GPU memory the page shows, in percent.
const USUAL_SHARE: u32 = 30;

/// The time for which batches of one size are sent, one by one.
const SPAN: Duration = Duration::from_millis(300);

/// The time limit of `nvidia-smi`.
const SMI_TIMEOUT: Duration = Duration::from_secs(10);

/// The number of bytes in a MiB.
const MIB: f64 = 1024.0 * 1024.0;

/// The measurements of a model at one share.
struct ShareColumn {
    share: u32,
    worker: WorkerStatusJson,
    /// The execution time in ms, by batch size.
    execution_ms: BTreeMap<u32, f64>,
    memory_mib: Option<f64>,
}

pub(crate) async fn run(settings: &CheckSettings, figures: &mut FigureStore) -> Result<(), StageError> {
    let shares: &[u32] = if settings.quick { &QUICK_SHARES } else { &SHARES };
    for model in &settings.models {
        if figures.has_model(CheckStage::Sweep, &model.name, settings.quick) {
            continue;
        }
        let models = std::slice::from_ref(model);
        let name = format!("sweep-{}", model.name);
        let service = ServingOptions {
            name: &name,
            models,
            share: shares[0],
            batch: BATCHES[BATCHES.len() - 1],
            handover: "shadow",
        };
        let serving = RunningServer::start(settings, service).await?;
        let subject = TestedModel::learn(&serving.server, &model.name).await?;
        let mut columns = Vec::new();
        for (n, &share) in shares.iter().enumerate() {
            if n > 0 {
                serving.server.resize(&model.name, share).await?;
            }
            let worker = serving.wait_single_worker(&model.name).await?;
            let mut times = BTreeMap::new();
            for batch in BATCHES {
                let closed =
                    subject.saturate(&serving.server, Saturation { rows: batch, in_flight: 1 }, SPAN).await?;
                let execution = execution_ms(&serving, &model.name, batch).await?;
                times.extend(execution.or(median(&closed.latencies_ms)).map(|ms| (batch, rounded(ms))));
            }
            // The driver attributes shared weights to the worker that loaded them. If another
            // worker loaded weights that this worker uses, their size is added.
            let kind = |kind: &str| {
                worker.more.get("memory").and_then(|memory| memory[kind].as_f64()).unwrap_or(0.0)
            };
            let shared = kind("weights_mib") - kind("brought_mib");
            let memory_mib = memory_of(settings, worker.pid).await?.map(|used| used + shared);
            columns.push(ShareColumn { share, worker, execution_ms: times, memory_mib });
            into_figures(figures, model, &columns);
        }
        write_profile(settings, figures, model, columns)?;
        serving.stop(figures).await?;
        figures.record_model(CheckStage::Sweep, &model.name, settings.quick)?;
    }
    Ok(())
}

/// Returns the GPU memory of a process in MiB, or `None` without a GPU.
async fn memory_of(settings: &CheckSettings, pid: i32) -> Result<Option<f64>, StageError> {
    let CheckedDevice::Gpu(_) = settings.device else { return Ok(None) };
    let mut command = Command::new("nvidia-smi");
    command.args(["--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]);
    let text = output(command, SMI_TIMEOUT, &settings.log("sweep")).await?;
    let apps = text.lines().filter_map(|line| line.split_once(','));
    let own = apps.filter(|(of, _)| of.trim().parse() == Ok(pid));
    Ok(own.filter_map(|(_, used)| used.trim().parse::<f64>().ok()).reduce(f64::max))
}

fn into_figures(figures: &mut FigureStore, model: &MeasuredModel, columns: &[ShareColumn]) {
    for column in columns {
        let share = column.share.to_string();
        let error = column.worker.more.get("answer_error").cloned().unwrap_or(Value::Null);
        figures.set(&["answer_error", &model.name, &share], error);
        figures.set(&["execution_ms", &model.name, &share], json!(column.execution_ms));
        let boot = column.worker.more.get("boot_ms").cloned().unwrap_or(Value::Null);
        figures.set(&["raw", "sweep_boot_ms", &model.name, &share], boot);
        figures.set(&["shadow_memory_mib", &model.name, "by_share", &share], column.memory_mib);
    }
    let usual = columns.iter().find(|column| column.share == USUAL_SHARE);
    let Some(used) = usual.and_then(|column| column.memory_mib) else { return };
    let weights = (model.size as f64 / MIB).round();
    let context = figures.get(&["context_memory_mib", &USUAL_SHARE.to_string()]).and_then(Value::as_f64);
    let activations = context.map(|context| used - context - weights);
    for (part, mib) in [("context", context), ("weights", Some(weights)), ("activations", activations)] {
        figures.set(&["shadow_memory_mib", &model.name, part], mib);
    }
}

/// Writes the profile in shadowslice's format.
fn write_profile(
    settings: &CheckSettings,
    figures: &FigureStore,
    model: &MeasuredModel,
    mut columns: Vec<ShareColumn>,
) -> Result<(), StageError> {
    columns.sort_by_key(|column| column.worker.sms);
    columns.dedup_by_key(|column| column.worker.sms);
    let (source, memory) = (source(settings, figures), memory(figures, &model.name));
    let boot: Vec<&Value> = columns.iter().filter_map(|column| column.worker.more.get("boot_ms")).collect();
    let start = |parts: &[&str]| {
        let whole = |boot: &&Value| parts.iter().filter_map(|part| boot[*part].as_f64()).sum::<f64>();
        median(&boot.iter().map(whole).collect::<Vec<_>>()).map_or(0, |ms| ms.round() as u64)
    };
    let row = |cells: Vec<String>| cells.join(", ");
    let mut text = format!(
        "# Measured through `shadowslice serve`, one request at a time.\n{source}\n{memory}\n\
         start: {{process: {}ms, load: {}ms, warm: {}ms}}\nexecution_ms:\n  sms: [{}]\n",
        start(&["spawn", "libraries", "context"]),
        start(&["session"]),
        start(&["warmup", "proof"]),
        row(columns.iter().map(|column| column.worker.sms.to_string()).collect()),
    );
    for batch in BATCHES {
        let times: Option<Vec<String>> =
            columns.iter().map(|column| column.execution_ms.get(&batch).map(f64::to_string)).collect();
        if let Some(times) = times {
            writeln!(text, "  {batch}: [{}]", row(times)).expect("writing to a string cannot fail");
        }
    }
    let path = settings.out.join("profiles").join(format!("{}-served.yaml", model.name));
    std::fs::write(&path, text).map_err(StageError::io("write", &path))
}
