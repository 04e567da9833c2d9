//! GPU memory of a model with one worker and with two, and after deaths of all workers and of the
//! MPS server under load.

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use shadowslice_tests::process::ProcessHandle;
use shadowslice_tests::status::ModelStatusJson as ModelStatus;

use crate::error::StageError;
use crate::figures::FigureStore;
use crate::models::MeasuredModel;
use crate::serving::{RunningServer, ServingOptions, config};
use crate::stages::CheckStage;
use crate::tools::{CheckSettings, CheckedDevice, smi};
use crate::traffic::{BackgroundLoad, TestedModel};

/// The largest batch, in rows.
const BATCH: u32 = 32;

/// The shares of the first worker and of the second, in percent.
const SHARES: [u32; 2] = [100, 60];

/// Times that all workers of a model are killed.
const KILLS: usize = 10;

/// Requests that are answered between two kills, at least.
const BETWEEN_KILLS: u64 = 50;

/// Times that the MPS server is killed.
const SERVER_KILLS: usize = 1;

/// The load meanwhile, in requests a second.
const RATE: f64 = 50.0;

/// The most by which memory may have grown after the deaths, in MiB.
const GROWTH: i64 = 16;

pub(crate) async fn run(setting: &CheckSettings, figures: &mut FigureStore) -> Result<(), StageError> {
    for model in &setting.models {
        if !figures.has_model(CheckStage::Memory, &model.name, setting.quick) {
            of_model(setting, figures, model).await?;
            figures.has_now(CheckStage::Memory, &model.name, setting.quick)?;
        }
    }
    Ok(())
}

async fn of_model(
    setting: &CheckSettings,
    figures: &mut FigureStore,
    model: &MeasuredModel,
) -> Result<(), StageError> {
    let idle = used_mib(setting).await?;
    let more = async || Ok::<_, StageError>(used_mib(setting).await? - idle);
    let (models, name) = (std::slice::from_ref(model), format!("memory-{}", model.name));
    let service = ServingOptions { name: &name, models, share: SHARES[0], batch: BATCH, handover: "shadow" };
    // The relieved worker stays until its memory was read.
    let config = config(setting, service).replace("dwell: 200ms", "dwell: 5s");
    let serving = RunningServer::start_with(setting, &name, &config).await?;
    let subject = TestedModel::learn(&serving.server, &model.name).await?;
    let kinds = serving.alone(&model.name).await?.more.get("memory").cloned();
    let one = more().await?;
    let load = BackgroundLoad::begin(&subject, RATE, None);
    let handed = serving.hand_over(&model.name, SHARES[1]).await?;
    let two = more().await?;
    serving.alone(&model.name).await?;
    let before = more().await?;
    let kills = setting.count(KILLS, 2);
    for _ in 0..kills {
        kill_all(&serving, model).await?;
    }
    for _ in 0..SERVER_KILLS {
        kill_server(&serving, model).await?;
    }
    let tally = load.end(true).await?.tally;
    let after = more().await?;
    let figure = json!({
        "one_mib": one, "two_mib": two, "effect_ms": handed.handover.effect_ms, "kinds": kinds,
        "kills": kills, "before_kills_mib": before, "after_kills_mib": after,
        "requests": tally.offered, "lost": tally.failures(), "wrong": tally.wrong,
    });
    figures.set(&["memory", &model.name], figure);
    serving.stop(figures).await?;
    figures.set(&["memory", &model.name, "left_mib"], more().await?);
    if tally.failures() + tally.wrong > 0 || after - before > GROWTH {
        let (lost, wrong, examples) = (tally.failures(), tally.wrong, tally.examples);
        let why = format!("{lost} lost, {wrong} wrong {examples:?}; {before} MiB before, {after} after");
        return Err(StageError::Request { model: model.name.clone(), why });
    }
    Ok(())
}

/// Kills all workers of a model, and waits until another one serves.
async fn kill_all(serving: &RunningServer, model: &MeasuredModel) -> Result<(), StageError> {
    let doomed: Vec<i32> =
        serving.server.model(&model.name).await?.workers.iter().map(|worker| worker.pid).collect();
    for process in doomed.iter().filter_map(|pid| ProcessHandle::of(*pid)) {
        // It may just have ended.
        process.signal(Signal::SIGKILL).ok();
    }
    let fresh = |status: &ModelStatus| {
        let other = status.workers.iter().any(|worker| !doomed.contains(&worker.pid));
        status.state == "ready" && other
    };
    let status = serving.server.wait_status(&model.name, "a worker after the kill", fresh).await?;
    // A request that is there at one death after another would be held to be the cause.
    let enough = status.requests.succeeded + BETWEEN_KILLS;
    let served = |status: &ModelStatus| status.requests.succeeded > enough;
    serving.server.wait_status(&model.name, "answers after the kill", served).await?;
    Ok(())
}

/// Kills the MPS server, and with it all workers; waits until another one serves.
async fn kill_server(serving: &RunningServer, model: &MeasuredModel) -> Result<(), StageError> {
    let server = serving.server.status().await?.gpus.first().and_then(|gpu| gpu.mps_server_pid);
    let Some(process) = server.and_then(ProcessHandle::of) else { return Ok(()) };
    let before = serving.alone(&model.name).await?.pid;
    process.signal(Signal::SIGKILL).ok();
    let fresh = |status: &ModelStatus| {
        status.state == "ready" && status.workers.iter().all(|worker| worker.pid != before)
    };
    serving.server.wait_status(&model.name, "a worker after the server's end", fresh).await?;
    Ok(())
}

/// The GPU's memory in use, in MiB; 0 on an emulated one.
async fn used_mib(setting: &CheckSettings) -> Result<i64, StageError> {
    let CheckedDevice::Gpu(index) = &setting.device else { return Ok(0) };
    let said = smi(setting, index, "memory.used").await?;
    said.parse().map_err(|_| StageError::Unusable(format!("nvidia-smi said {said:?}")))
}

/// The page's table.
pub(crate) fn show(figures: &Value) -> String {
    let parts =
        ["one_mib", "two_mib", "effect_ms", "before_kills_mib", "after_kills_mib", "lost", "left_mib"];
    crate::report::matrix(figures, "memory", &parts)
}
