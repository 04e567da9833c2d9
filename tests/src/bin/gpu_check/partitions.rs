//! Shares that change inside the workers: no request lost or answered wrongly under load, how soon
//! changes are in force, what they cost, which models keep apart, and that percentages refuse half
//! precision with a reason.

use std::time::Duration;

use futures_util::future::join_all;
use serde_json::{Value, json};
use shadowslice_tests::server::ServerUnderTest;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

use crate::error::{StageError, chain};
use crate::figures::FigureStore;
use crate::lossless::{ModelLoads, end_all};
use crate::models::MeasuredModel;
use crate::numbers::{rounded, summary};
use crate::serving::{RunningServer, ServingOptions, config, home};
use crate::stages::STOPPING;
use crate::tools::{CheckSettings, CheckedDevice};
use crate::traffic::{BackgroundLoad, LoadResult, TestedModel};

/// Changes of all models together, of each kind.
const CHANGES: usize = 500;

/// Shares that take turns, in percent: few enough for a worker to have them all ready,
const ANNOUNCED: &[u32] = &[30, 36];
/// and more than it keeps ready.
const UNANNOUNCED: &[u32] = &[30, 36, 42, 48, 55, 61];

/// From one change of a model to the next.
const EVERY: Duration = Duration::from_millis(100);

/// Parts of the load of the twin runs, which have no changes: one part at each of the shares that
/// take turns.
const TWIN_PARTS: u64 = 5;

/// Two models that are to keep apart, if they are there: the quiet model, which must not notice,
/// and the busy model, which never rests.
const PAIR: [&str; 2] = ["mobilenet-v2", "vgg19"];

/// The load of the quiet model, in requests a second, and the number of parts of the load.
const QUIET_RATE: f64 = 150.0;
const QUIET_PARTS: u64 = 3;

/// Requests under way of the second.
const HOG_UNDER_WAY: usize = 16;

/// How long a model that must be refused may take to say so.
const REFUSED_WITHIN: Duration = Duration::from_secs(120);

pub(crate) async fn run(
    setting: &CheckSettings,
    figures: &mut FigureStore,
    end: Instant,
) -> Result<(), StageError> {
    let models: Vec<MeasuredModel> = setting.models.iter().chain(&setting.halves).cloned().collect();
    let outcome = changes(setting, figures, &models, end - STOPPING).await;
    figures.save()?;
    isolation(setting, figures, &models).await?;
    figures.save()?;
    if let (CheckedDevice::Gpu(_), Some(half)) = (&setting.device, setting.halves.first()) {
        refusal(setting, figures, half).await?;
    }
    outcome
}

/// Changes all models' shares again and again under load.
async fn changes(
    setting: &CheckSettings,
    figures: &mut FigureStore,
    models: &[MeasuredModel],
    deadline: Instant,
) -> Result<(), StageError> {
    let service =
        ServingOptions { name: "partitions", models, share: ANNOUNCED[0], batch: 8, handover: "auto" };
    let serving = RunningServer::start(setting, service).await?;
    let names = starts(&serving, figures).await?;
    let loads = ModelLoads::half(&serving, &names).await?;
    let mut twins = Vec::new();
    // The share with which the changes begin comes last.
    for share in ANNOUNCED.iter().rev() {
        settle(&serving, &names, *share).await;
        twins.push(end_all(loads.begin(Some(TWIN_PARTS)), false).await?);
    }
    let mut failures = Vec::new();
    for (kind, shares) in [("announced", ANNOUNCED), ("unannounced", UNANNOUNCED)] {
        let memory = memory(&serving).await?;
        let running = loads.begin(None);
        let each = setting.count(CHANGES, 40).div_ceil(names.len());
        let changing = names.iter().map(|name| change(&serving.server, name, shares, each, deadline));
        let done = join_all(changing).await;
        let with = end_all(running, true).await?;
        let grown: Vec<i64> = memory_grown(&memory, &self::memory(&serving).await?);
        failures.extend(into_figures(figures, kind, &loads, (&with, &twins), &done));
        figures.set(&["partitions", kind, "memory_grown_mib"], grown);
        settle(&serving, &names, ANNOUNCED[0]).await;
    }
    serving.stop(figures).await?;
    if failures.is_empty() { Ok(()) } else { Err(StageError::Unusable(failures.join("; "))) }
}

/// Gives all models this share. A share that is in force already is no failure.
async fn settle(serving: &RunningServer, names: &[String], share: u32) {
    join_all(names.iter().map(|name| serving.server.resize_by_socket(name, share))).await;
}

/// How the workers started, and which groups they have; returns the models with shares that change
/// inside the worker.
async fn starts(serving: &RunningServer, figures: &mut FigureStore) -> Result<Vec<String>, StageError> {
    let models = serving.server.status().await?.models;
    for model in &models {
        let boot = model.workers.first().map(|worker| worker.more.clone());
        let boot = boot.unwrap_or_default();
        let of = json!({ "boot_ms": boot.get("boot_ms"), "answer_error": boot.get("answer_error"),
            "memory_mib": model.workers.first().and_then(|worker| worker.memory_mib), "groups": model.groups,
            "mechanism": model.mechanism, "no_partition": model.more.get("no_partition") });
        figures.set(&["partitions", "starts", &model.name], of);
    }
    let inside = models.into_iter().filter(|model| model.mechanism == "in-process");
    Ok(inside.map(|model| model.name).collect())
}

/// MiB of each worker, in the order of their processes.
async fn memory(serving: &RunningServer) -> Result<Vec<Option<u64>>, StageError> {
    let models = serving.server.status().await?.models;
    Ok(models.iter().flat_map(|model| &model.workers).map(|worker| worker.memory_mib).collect())
}

fn memory_grown(before: &[Option<u64>], after: &[Option<u64>]) -> Vec<i64> {
    let grown = |(before, after): (&Option<u64>, &Option<u64>)| {
        Some(after.as_ref()?.cast_signed() - before.as_ref()?.cast_signed())
    };
    before.iter().zip(after).filter_map(grown).collect()
}

/// The outcomes of one model's changes.
#[derive(Debug, Default)]
struct ShareChanges {
    /// From the order to its answer: the next batch runs there.
    in_force_ms: Vec<f64>,
    stalls_us: Vec<f64>,
    failed: Vec<String>,
}

async fn change(
    server: &ServerUnderTest,
    model: &str,
    shares: &[u32],
    times: usize,
    deadline: Instant,
) -> ShareChanges {
    let mut changed = ShareChanges::default();
    let mut tick = interval(EVERY);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for share in shares.iter().cycle().skip(1).take(times) {
        tick.tick().await;
        if Instant::now() > deadline {
            break;
        }
        let ordered = Instant::now();
        match server.resize_by_socket(model, *share).await {
            Ok(handover) => {
                changed.in_force_ms.push(ordered.elapsed().as_secs_f64() * 1e3);
                changed.stalls_us.extend(handover.stall_us);
            }
            Err(error) => changed.failed.push(chain(&error)),
        }
    }
    changed
}

/// Stores figures, and returns the faults that were found.
fn into_figures(
    figures: &mut FigureStore,
    kind: &str,
    loads: &ModelLoads,
    (with, twins): (&[LoadResult], &[Vec<LoadResult>]),
    done: &[ShareChanges],
) -> Vec<String> {
    let mut failures = Vec::new();
    let all: Vec<f64> = done.iter().flat_map(|changed| changed.in_force_ms.iter().copied()).collect();
    figures.set(&["partitions", kind, "in_force_ms"], summary(&all));
    for (index, ((subject, with), done)) in loads.subjects.iter().zip(with).zip(done).enumerate() {
        let (name, tally) = (&subject.model, &with.tally);
        let p99 = |loaded: &LoadResult| rounded(loaded.tally.latency_ms(0.99));
        let of: Value = json!({
            "done": done.in_force_ms.len(), "in_force_ms": summary(&done.in_force_ms), "stall_us": summary(&done.stalls_us),
            "offered": tally.offered, "lost": tally.failures(), "wrong": tally.wrong, "examples": tally.examples,
            "failed": done.failed, "p99_ms": p99(with), "twin_p99_ms": twins.iter().map(|twin| p99(&twin[index])).fold(0.0, f64::max),
        });
        figures.set(&["partitions", kind, "models", name], of);
        if tally.failures() + tally.wrong > 0 {
            failures.push(format!(
                "{name}: {} lost {:?}, {} wrong {:?}",
                tally.failures(),
                tally.failed,
                tally.wrong,
                tally.examples
            ));
        }
        failures.extend(
            done.failed.first().map(|why| format!("{name}: {} changes failed: {why}", done.failed.len())),
        );
    }
    failures
}

/// The latency of a model with requests at random times beside a busy model: alone, on other
/// groups, on the same groups.
async fn isolation(
    setting: &CheckSettings,
    figures: &mut FigureStore,
    models: &[MeasuredModel],
) -> Result<(), StageError> {
    let pair: Vec<MeasuredModel> =
        PAIR.iter().filter_map(|name| models.iter().find(|model| model.name == *name)).cloned().collect();
    let [quiet, hog] = &pair[..] else { return Ok(()) };
    let service =
        ServingOptions { name: "isolation", models: &pair, share: 20, batch: 8, handover: "in-process" };
    let serving = RunningServer::start(setting, service).await?;
    let subject = TestedModel::learn(&serving.server, &quiet.name).await?;
    let hogging = TestedModel::learn(&serving.server, &hog.name).await?;
    let quiet_load = async || BackgroundLoad::begin(&subject, QUIET_RATE, Some(QUIET_PARTS)).end(false).await;
    serving.server.resize(&hog.name, 75).await?;
    // The first load warms up the shapes and shares that are used from now on.
    quiet_load().await?;
    latencies(figures, "alone", &quiet_load().await?, None);
    for (what, shares) in [("apart", [20, 75]), ("together", [100, 100])] {
        for (model, share) in [quiet, hog].into_iter().zip(shares) {
            // A share that is in force already is no failure.
            serving.server.resize(&model.name, share).await.ok();
        }
        let span = Duration::from_secs(2 * QUIET_PARTS + 1);
        let hog = hogging.saturate(&serving.server, (1, HOG_UNDER_WAY), span);
        let (hog, loaded) = tokio::join!(hog, quiet_load());
        latencies(figures, what, &loaded?, Some(hog?.rows_per_s));
    }
    serving.stop(figures).await
}

fn latencies(figures: &mut FigureStore, what: &str, loaded: &LoadResult, hog_rate: Option<f64>) {
    let ms = |part| rounded(loaded.tally.latency_ms(part));
    let of =
        json!({ "p50": ms(0.5), "p90": ms(0.9), "p99": ms(0.99), "neighbours_rate": hog_rate.map(rounded) });
    figures.set(&["partitions", "isolation", what], of);
}

/// Half precision at a share by percentage is refused, and the model reports the reason and the
/// remedy.
async fn refusal(
    setting: &CheckSettings,
    figures: &mut FigureStore,
    half: &MeasuredModel,
) -> Result<(), StageError> {
    let models = std::slice::from_ref(half);
    let service = ServingOptions { name: "refusal", models, share: 60, batch: 8, handover: "shadow" };
    let server = ServerUnderTest::start(home(setting, service.name, &config(setting, service))?, None)?;
    let begun = Instant::now();
    let refused = timeout(REFUSED_WITHIN, async {
        loop {
            let status = server.status().await.map(|status| status.models).unwrap_or_default();
            if let Some(model) =
                status.into_iter().find(|model| model.state == "unready" || model.state == "ready")
            {
                return model;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    });
    let model = refused
        .await
        .map_err(|_| StageError::Unusable("half precision is neither served nor refused".into()))?;
    let why = model.more.get("why").cloned().unwrap_or_default();
    figures.set(
        &["partitions", "half_by_percentage"],
        json!({ "model": half.name, "state": model.state, "why": why,
        "seconds": rounded(begun.elapsed().as_secs_f64()) }),
    );
    server.stop().await?;
    Ok(())
}
