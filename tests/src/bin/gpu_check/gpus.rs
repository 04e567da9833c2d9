//! The stage `gpus`, which uses two GPUs of one host. It measures the throughput of each GPU alone
//! and of both together. It checks that hand-overs and the death of an MPS server on one GPU do not
//! affect the other GPU.

use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::try_join_all;
use nix::sys::signal::Signal;
use serde_json::{Map, json};
use shadowslice_tests::process::{ProcessHandle, descendants};
use shadowslice_tests::status;
use tokio::process::Command;
use tokio::time::{Instant, sleep};

use crate::error::StageError;
use crate::figures::FigureStore;
use crate::lossless::{ModelLoads, finish_all};
use crate::models::MeasuredModel;
use crate::neighbours::{TimeWindow, p99};
use crate::numbers::rounded;
use crate::serving::{RunningServer, gpu, threads};
use crate::tools::{CheckSettings, CheckedDevice, output};
use crate::traffic::{LoadResult, Saturation, TestedModel};

/// The number of models on each GPU.
const MODELS: usize = 2;

/// The load on each model during the measurement of the capacities.
const SATURATION: Saturation = Saturation { rows: 8, in_flight: 8 };

/// The duration of the measurement of the capacities.
const SATURATE: Duration = Duration::from_secs(4);

/// The time for which the load runs before the first hand-over on the second GPU.
const CALM: Duration = Duration::from_secs(8);

/// The number of hand-overs of each model on the second GPU.
const HANDOVERS: usize = 4;

/// The shares between which hand-overs alternate, in percent.
const SHARES: [u32; 2] = [45, 30];

/// The time limit of `nvidia-smi`.
const SMI_TIMEOUT: Duration = Duration::from_secs(20);

/// The index of the second GPU in the configuration key `gpus`.
const SECOND: usize = 1;

pub(crate) async fn run(settings: &CheckSettings, figures: &mut FigureStore) -> Result<(), StageError> {
    let Some(gpus) = two_gpus(settings).await? else {
        println!("gpus: skipped, the host has only one GPU");
        figures.set(&["gpus"], json!({ "count": 1 }));
        return Ok(());
    };
    let models = &settings.models[..MODELS.min(settings.models.len())];
    let serving = RunningServer::start_with(settings, "gpus", &config(&gpus, models)).await?;
    let names = |gpu: usize| models.iter().map(move |model| name(model, gpu));
    let [first, second] = [0, SECOND].map(|gpu| names(gpu).collect::<Vec<_>>());
    capacities(figures, &serving, [&first, &second]).await?;

    let loads = ModelLoads::half(&serving, &[first.clone(), second.clone()].concat()).await?;
    let running = loads.start(None);
    let disturbed = disturb(&serving, &second, gpus[SECOND].uuid.as_deref()).await?;
    let loaded = finish_all(running, true).await?;
    let verdict = into_figures(figures, &[first, second].concat(), &loaded, &disturbed, models.len());
    serving.stop(figures).await?;
    verdict
}

/// A GPU, with its entry in the configuration key `gpus`, and the UUID of a real GPU.
struct CheckedGpu {
    device: String,
    uuid: Option<String>,
}

/// Returns the GPU to measure and another GPU of the host, or `None` if the host has only one GPU.
async fn two_gpus(settings: &CheckSettings) -> Result<Option<[CheckedGpu; 2]>, StageError> {
    let CheckedDevice::Gpu(measured) = &settings.device else {
        let gpu = || CheckedGpu { device: gpu(settings), uuid: None };
        return Ok(Some([gpu(), gpu()]));
    };
    let mut command = Command::new("nvidia-smi");
    command.args(["--query-gpu=index,uuid", "--format=csv,noheader"]);
    let text = output(command, SMI_TIMEOUT, &settings.log("gpus")).await?;
    let mut gpus: Vec<(&str, &str)> = text.lines().filter_map(|line| line.trim().split_once(", ")).collect();
    gpus.sort_by_key(|(index, _)| index != measured);
    let gpu = |(index, uuid): (&str, &str)| CheckedGpu {
        device: format!("{{device: {index}}}"),
        uuid: Some(uuid.into()),
    };
    let two: Vec<CheckedGpu> = gpus.into_iter().take(2).map(gpu).collect();
    Ok(two.try_into().ok())
}

/// Returns the name of a model on one of the GPUs.
fn name(model: &MeasuredModel, gpu: usize) -> String {
    format!("{}-{gpu}", model.name)
}

/// Returns a configuration with the same models on each GPU.
fn config(gpus: &[CheckedGpu; 2], models: &[MeasuredModel]) -> String {
    let [first, second] = gpus.each_ref().map(|gpu| gpu.device.as_str());
    let (threads, share) = (threads(), SHARES[1]);
    let mut text = format!(
        "listen: {{http: [], grpc: [\"unix:grpc.sock\"], metrics: []}}\ngpus: [{first}, {second}]\n\
         controller: {{policy: static}}\ntimeouts: {{spawn: 30s, warm: 3m, dwell: 200ms}}\nmodels:\n"
    );
    for (gpu, model) in (0..gpus.len()).flat_map(|gpu| models.iter().map(move |model| (gpu, model))) {
        let (name, path) = (name(model, gpu), model.path.to_string_lossy());
        let line = format!(
            "  - {{name: {name}, path: {path:?}, gpu: {gpu}, slo: 10s, share: {{initial: {share}%}}, batch: {{max: 8}}, handover: shadow, \
             queue: {{memory: 1Gi, on_late: serve}}, threads: {threads}}}"
        );
        writeln!(text, "{line}").expect("writing to a string cannot fail");
    }
    text
}

/// Measures the throughput of each GPU alone and of both together, in rows per second.
async fn capacities(
    figures: &mut FigureStore,
    serving: &RunningServer,
    gpus: [&[String]; 2],
) -> Result<(), StageError> {
    let learn = async |names: &[String]| {
        try_join_all(names.iter().map(|name| TestedModel::learn(&serving.server, name))).await
    };
    let [first, second] = [learn(gpus[0]).await?, learn(gpus[SECOND]).await?];
    let rows = async |subjects: &[Arc<TestedModel>]| -> Result<f64, StageError> {
        let saturating =
            subjects.iter().map(|subject| subject.saturate(&serving.server, SATURATION, SATURATE));
        Ok(try_join_all(saturating).await?.iter().map(|saturated| saturated.rows_per_s).sum())
    };
    let alone = [rows(&first).await?, rows(&second).await?];
    let together = rows(&[first, second].concat()).await?;
    let part = together / (alone[0] + alone[1]);
    figures.set(
        &["gpus"],
        json!({ "count": 2, "alone_rows_per_s": alone.map(rounded), "together_rows_per_s": rounded(together),
            "together_of_alone": rounded(part) }),
    );
    Ok(())
}

/// The periods before the hand-overs on the second GPU, during these hand-overs, and after the kill
/// of that GPU's MPS server.
struct Disturbance {
    calm: TimeWindow,
    handovers: TimeWindow,
    /// The time from the kill of the MPS server until all models are ready again.
    killed: Option<TimeWindow>,
}

async fn disturb(
    serving: &RunningServer,
    models: &[String],
    uuid: Option<&str>,
) -> Result<Disturbance, StageError> {
    let begun = Instant::now();
    // The period without hand-overs has a fixed length.
    sleep(CALM).await;
    let calm = (begun, Instant::now());
    for (model, n) in models.iter().flat_map(|model| (0..HANDOVERS).map(move |n| (model, n))) {
        serving.hand_over(model, SHARES[n % 2]).await?;
    }
    let handovers = (calm.1, Instant::now());
    let Some(uuid) = uuid else { return Ok(Disturbance { calm, handovers, killed: None }) };
    let before = try_join_all(models.iter().map(|model| serving.wait_single_worker(model))).await?;
    let server = mps_server(serving.server.process().pid, uuid)
        .ok_or_else(|| StageError::Unusable(format!("cannot find the MPS server of {uuid}")))?;
    let killed = Instant::now();
    server
        .signal(Signal::SIGKILL)
        .map_err(|errno| StageError::Unusable(format!("cannot kill the MPS server: {errno}")))?;
    for (model, before) in models.iter().zip(before) {
        let back = |model: &status::ModelStatusJson| {
            let restarted =
                |worker: &status::WorkerStatusJson| worker.role == "incumbent" && worker.pid != before.pid;
            model.state == "ready" && model.workers.iter().any(restarted)
        };
        serving.server.wait_status(model, "a new worker after the kill", back).await?;
    }
    Ok(Disturbance { calm, handovers, killed: Some((killed, Instant::now())) })
}

/// Finds a GPU's MPS server among the descendants of a supervisor.
fn mps_server(supervisor: i32, uuid: &str) -> Option<ProcessHandle> {
    let holds = |process: &ProcessHandle, file: &str, text: &str| {
        let read = std::fs::read(format!("/proc/{}/{file}", process.pid)).unwrap_or_default();
        String::from_utf8_lossy(&read).contains(text)
    };
    descendants(supervisor).into_iter().find(|process| {
        holds(process, "cmdline", "nvidia-cuda-mps-server") && holds(process, "environ", uuid)
    })
}

/// Stores the figures. Returns an error if an answer was wrong or a request was lost. Lost requests
/// on the GPU whose MPS server was killed are not errors.
fn into_figures(
    figures: &mut FigureStore,
    names: &[String],
    loaded: &[LoadResult],
    disturbed: &Disturbance,
    on_first: usize,
) -> Result<(), StageError> {
    let Disturbance { calm, handovers, killed } = disturbed;
    let mut models = Map::new();
    for (name, loaded) in names.iter().zip(loaded) {
        let at = |window: &TimeWindow| p99(&loaded.spans, &[*window]).map(rounded);
        let of = json!({ "offered": loaded.tally.offered, "lost": loaded.tally.failures(), "wrong": loaded.tally.wrong,
            "calm_ms": at(calm), "handovers_ms": at(handovers), "killed_ms": killed.as_ref().and_then(at) });
        models.insert(name.clone(), of);
    }
    figures.set(&["gpus", "models"], models);
    figures.set(&["gpus", "handovers"], HANDOVERS * (names.len() - on_first));
    let back = killed.map(|(killed, back)| rounded((back - killed).as_secs_f64()));
    figures.set(&["gpus", "back_after_s"], back);
    // When a GPU's MPS server dies, the requests in flight on that GPU are lost.
    let spared = if killed.is_some() { &loaded[..on_first] } else { loaded };
    let lost: u64 = spared.iter().map(|loaded| loaded.tally.failures()).sum();
    let wrong: u64 = loaded.iter().map(|loaded| loaded.tally.wrong).sum();
    if lost + wrong > 0 {
        let why = format!("{lost} requests were lost without a cause, and {wrong} answers were wrong");
        return Err(StageError::Unusable(why));
    }
    Ok(())
}
