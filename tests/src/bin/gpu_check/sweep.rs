//! Each model alone at each share: execution times by batch size as a profile, GPU memory, errors of the answers.

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
use crate::traffic::TestedModel;

/// The shares, in percent; the first is the share of the start.
const SHARES: [u32; 8] = [100, 80, 60, 45, 30, 20, 12, 6];

/// The shares of a quick run.
const QUICK_SHARES: [u32; 3] = [100, 30, 12];

/// The batch sizes, in rows.
const BATCHES: [u32; 6] = [1, 2, 4, 8, 16, 32];

/// The share whose memory the figures name first, in percent.
const USUAL_SHARE: u32 = 30;

/// How long batches of one size are sent, one after the other.
const SPAN: Duration = Duration::from_millis(300);

/// How long nvidia-smi may take.
const SMI_WITHIN: Duration = Duration::from_secs(10);

/// Bytes of a MiB.
const MIB: f64 = 1024.0 * 1024.0;

/// A model at one share.
struct ShareColumn {
    share: u32,
    worker: WorkerStatusJson,
    /// By batch size.
    execution_ms: BTreeMap<u32, f64>,
    memory_mib: Option<f64>,
}

pub(crate) async fn run(setting: &CheckSettings, figures: &mut FigureStore) -> Result<(), StageError> {
    let shares: &[u32] = if setting.quick { &QUICK_SHARES } else { &SHARES };
    for model in &setting.models {
        if figures.has_model(CheckStage::Sweep, &model.name, setting.quick) {
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
        let serving = RunningServer::start(setting, service).await?;
        let subject = TestedModel::learn(&serving.server, &model.name).await?;
        let mut columns = Vec::new();
        for (n, &share) in shares.iter().enumerate() {
            if n > 0 {
                serving.server.resize(&model.name, share).await?;
            }
            let worker = serving.alone(&model.name).await?;
            let mut times = BTreeMap::new();
            for batch in BATCHES {
                let closed = subject.saturate(&serving.server, (batch, 1), SPAN).await?;
                let execution = execution_ms(&serving, &model.name, batch).await?;
                times.extend(execution.or(median(&closed.latencies_ms)).map(|ms| (batch, rounded(ms))));
            }
            // The driver counts weights as those of the worker that brought them.
            let kind = |kind: &str| {
                worker.more.get("memory").and_then(|memory| memory[kind].as_f64()).unwrap_or(0.0)
            };
            let found = kind("weights_mib") - kind("brought_mib");
            let memory_mib = memory_of(setting, worker.pid).await?.map(|used| used + found);
            columns.push(ShareColumn { share, worker, execution_ms: times, memory_mib });
            into_figures(figures, model, &columns);
        }
        write_profile(setting, figures, model, columns)?;
        serving.stop(figures).await?;
        figures.has_now(CheckStage::Sweep, &model.name, setting.quick)?;
    }
    Ok(())
}

/// The GPU memory of a process in MiB; nothing without a GPU.
async fn memory_of(setting: &CheckSettings, pid: i32) -> Result<Option<f64>, StageError> {
    let CheckedDevice::Gpu(_) = setting.device else { return Ok(None) };
    let mut command = Command::new("nvidia-smi");
    command.args(["--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]);
    let said = output(command, SMI_WITHIN, &setting.log("sweep")).await?;
    let apps = said.lines().filter_map(|line| line.split_once(','));
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

/// The profile in shadowslice's own format.
fn write_profile(
    setting: &CheckSettings,
    figures: &FigureStore,
    model: &MeasuredModel,
    mut columns: Vec<ShareColumn>,
) -> Result<(), StageError> {
    columns.sort_by_key(|column| column.worker.sms);
    columns.dedup_by_key(|column| column.worker.sms);
    let (source, memory) = (source(setting, figures), memory(figures, &model.name));
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
            writeln!(text, "  {batch}: [{}]", row(times)).expect("a string takes everything");
        }
    }
    let path = setting.out.join("profiles").join(format!("{}-served.yaml", model.name));
    std::fs::write(&path, text).map_err(StageError::io("write", &path))
}
