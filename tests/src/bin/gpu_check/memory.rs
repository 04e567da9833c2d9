//! The stage `memory`, which measures the GPU memory of a model with one worker and with two
//! workers. It measures again after all workers and the MPS server have been killed under load.

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use shadowslice_tests::process::ProcessHandle;
use shadowslice_tests::status::ModelStatusJson as ModelStatus;

use crate::error::StageError;
use crate::figures::FigureStore;
use crate::models::MeasuredModel;
use crate::serving::{RunningServer, ServingOptions, config};
use crate::stages::CheckStage;
use crate::tools::{CheckSettings, CheckedDevice, query_gpu};
use crate::traffic::{BackgroundLoad, TestedModel};

/// The maximum batch size, in rows.
const BATCH: u32 = 32;

/// The shares of the first and the second worker, in percent.
const SHARES: [u32; 2] = [100, 60];

/// The number of times that the stage kills all workers of a model.
const KILLS: usize = 10;

/// The minimum number of requests that are answered between two kills.
const BETWEEN_KILLS: u64 = 50;

/// The number of times that the stage kills the MPS server.
const SERVER_KILLS: usize = 1;

/// The rate of the load, in requests per second.
const RATE: f64 = 50.0;

/// The maximum allowed increase of the used GPU memory from before the kills to after the kills, in
/// MiB.
const MAX_GROWTH_MIB: i64 = 16;

pub(crate) async fn run(settings: &CheckSettings, figures: &mut FigureStore) -> Result<(), StageError> {
    for model in &settings.models {
        if !figures.has_model(CheckStage::Memory, &model.name, settings.quick) {
            measure_model(settings, figures, model).await?;
            figures.record_model(CheckStage::Memory, &model.name, settings.quick)?;
        }
    }
    Ok(())
}

async fn measure_model(
    settings: &CheckSettings,
    figures: &mut FigureStore,
    model: &MeasuredModel,
) -> Result<(), StageError> {
    let idle = used_mib(settings).await?;
    let growth = async || Ok::<_, StageError>(used_mib(settings).await? - idle);
    let (models, name) = (std::slice::from_ref(model), format!("memory-{}", model.name));
    let service = ServingOptions { name: &name, models, share: SHARES[0], batch: BATCH, handover: "shadow" };
    // The old worker must remain until the memory of two workers has been read.
    let config = config(settings, service).replace("dwell: 200ms", "dwell: 5s");
    let serving = RunningServer::start_with(settings, &name, &config).await?;
    let subject = TestedModel::learn(&serving.server, &model.name).await?;
    let kinds = serving.wait_single_worker(&model.name).await?.more.get("memory").cloned();
    let one = growth().await?;
    let load = BackgroundLoad::start(&subject, RATE, None);
    let handed = serving.hand_over(&model.name, SHARES[1]).await?;
    let two = growth().await?;
    serving.wait_single_worker(&model.name).await?;
    let before = growth().await?;
    let kills = settings.count(KILLS, 2);
    for _ in 0..kills {
        kill_all(&serving, model).await?;
    }
    for _ in 0..SERVER_KILLS {
        kill_server(&serving, model).await?;
    }
    let tally = load.finish(true).await?.tally;
    let after = growth().await?;
    let figure = json!({
        "one_mib": one, "two_mib": two, "effect_ms": handed.handover.effect_ms, "kinds": kinds,
        "kills": kills, "before_kills_mib": before, "after_kills_mib": after,
        "requests": tally.offered, "lost": tally.failures(), "wrong": tally.wrong,
    });
    figures.set(&["memory", &model.name], figure);
    serving.stop(figures).await?;
    figures.set(&["memory", &model.name, "left_mib"], growth().await?);
    if tally.failures() + tally.wrong > 0 || after - before > MAX_GROWTH_MIB {
        let (lost, wrong, examples) = (tally.failures(), tally.wrong, tally.examples);
        let why = format!(
            "{lost} requests lost, {wrong} answers wrong {examples:?}; {before} MiB before the kills, {after} MiB after"
        );
        return Err(StageError::Request { model: model.name.clone(), why });
    }
    Ok(())
}

/// Kills all workers of a model, and waits until a new worker serves.
async fn kill_all(serving: &RunningServer, model: &MeasuredModel) -> Result<(), StageError> {
    let doomed: Vec<i32> =
        serving.server.model(&model.name).await?.workers.iter().map(|worker| worker.pid).collect();
    for process in doomed.iter().filter_map(|pid| ProcessHandle::of(*pid)) {
        // The worker may already have exited, so the error is ignored.
        process.signal(Signal::SIGKILL).ok();
    }
    let fresh = |status: &ModelStatus| {
        let other = status.workers.iter().any(|worker| !doomed.contains(&worker.pid));
        status.state == "ready" && other
    };
    let status = serving.server.wait_status(&model.name, "a worker after the kill", fresh).await?;
    // A request fails if it is in flight at several worker deaths. The stage therefore waits until
    // new requests have been answered.
    let enough = status.requests.succeeded + BETWEEN_KILLS;
    let served = |status: &ModelStatus| status.requests.succeeded > enough;
    serving.server.wait_status(&model.name, "answers after the kill", served).await?;
    Ok(())
}

/// Kills the MPS server, which also ends all workers. Then waits until a new worker serves.
async fn kill_server(serving: &RunningServer, model: &MeasuredModel) -> Result<(), StageError> {
    let server = serving.server.status().await?.gpus.first().and_then(|gpu| gpu.mps_server_pid);
    let Some(process) = server.and_then(ProcessHandle::of) else { return Ok(()) };
    let before = serving.wait_single_worker(&model.name).await?.pid;
    // The signal fails only if the server has already exited. The supervisor then replaces the
    // workers too, so the error is ignored.
    process.signal(Signal::SIGKILL).ok();
    let fresh = |status: &ModelStatus| {
        status.state == "ready" && status.workers.iter().all(|worker| worker.pid != before)
    };
    serving.server.wait_status(&model.name, "a worker after the server's end", fresh).await?;
    Ok(())
}

/// Returns the GPU memory that is in use, in MiB, or 0 for an emulated GPU.
async fn used_mib(settings: &CheckSettings) -> Result<i64, StageError> {
    let CheckedDevice::Gpu(index) = &settings.device else { return Ok(0) };
    let used = query_gpu(settings, index, "memory.used").await?;
    used.parse().map_err(|_| StageError::Unusable(format!("unexpected output of nvidia-smi: {used:?}")))
}

/// Formats the stage's table for gpu.md.
pub(crate) fn show(figures: &Value) -> String {
    let parts =
        ["one_mib", "two_mib", "effect_ms", "before_kills_mib", "after_kills_mib", "lost", "left_mib"];
    crate::report::matrix(figures, "memory", &parts)
}
