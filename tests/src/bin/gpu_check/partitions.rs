//! The stage `partitions`, which tests shares that change inside the workers.
//!
//! Under load, no request may be lost or answered wrongly. The stage measures when changes take
//! effect, how much they increase latencies, and how well two models are isolated. It also checks
//! that a half-precision model with a share by percentage is refused with a reason.

use std::time::Duration;

use futures_util::future::join_all;
use serde_json::{Value, json};
use shadowslice_tests::server::ServerUnderTest;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

use crate::error::{StageError, chain};
use crate::figures::FigureStore;
use crate::lossless::{ModelLoads, finish_all};
use crate::models::MeasuredModel;
use crate::numbers::{rounded, summary};
use crate::serving::{RunningServer, ServingOptions, config, home};
use crate::stages::STOPPING;
use crate::tools::{CheckSettings, CheckedDevice};
use crate::traffic::{BackgroundLoad, LoadResult, Saturation, TestedModel};

/// The number of share changes of all models together, for each kind of change.
const CHANGES: usize = 500;

/// The alternating shares of the changes of kind `announced`, in percent. A worker keeps the
/// partitions of all these shares ready.
const ANNOUNCED: &[u32] = &[30, 36];

/// The alternating shares of the changes of kind `unannounced`, in percent. A worker cannot keep
/// the partitions of all these shares ready.
const UNANNOUNCED: &[u32] = &[30, 36, 42, 48, 55, 61];

/// The interval between two changes of a model.
const CHANGE_INTERVAL: Duration = Duration::from_millis(100);

/// The number of parts of the load in each twin run. There is one twin run without changes for each
/// share.
const TWIN_PARTS: u64 = 5;

/// The two models of the isolation test, if both exist. The second model, the hog, is saturated.
/// The load on the hog must not change the latency of the first model.
const PAIR: [&str; 2] = ["mobilenet-v2", "vgg19"];

/// The rate of the first model's requests in the isolation test, in requests per second.
const QUIET_RATE: f64 = 150.0;

/// The number of parts of the first model's load in the isolation test.
const QUIET_PARTS: u64 = 3;

/// The number of requests in flight to the hog.
const HOG_IN_FLIGHT: usize = 16;

/// The time limit for the refusal of a half-precision model.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(120);

pub(crate) async fn run(
    settings: &CheckSettings,
    figures: &mut FigureStore,
    end: Instant,
) -> Result<(), StageError> {
    let models: Vec<MeasuredModel> = settings.models.iter().chain(&settings.half_models).cloned().collect();
    let outcome = changes(settings, figures, &models, end - STOPPING).await;
    figures.save()?;
    isolation(settings, figures, &models).await?;
    figures.save()?;
    if let (CheckedDevice::Gpu(_), Some(half)) = (&settings.device, settings.half_models.first()) {
        refusal(settings, figures, half).await?;
    }
    outcome
}

/// Changes the shares of all models repeatedly under load.
async fn changes(
    settings: &CheckSettings,
    figures: &mut FigureStore,
    models: &[MeasuredModel],
    deadline: Instant,
) -> Result<(), StageError> {
    let service =
        ServingOptions { name: "partitions", models, share: ANNOUNCED[0], batch: 8, handover: "auto" };
    let serving = RunningServer::start(settings, service).await?;
    let names = record_starts(&serving, figures).await?;
    let loads = ModelLoads::half(&serving, &names).await?;
    let mut twins = Vec::new();
    // The share at which the changes begin must be set last, so the order is reversed.
    for share in ANNOUNCED.iter().rev() {
        settle(&serving, &names, *share).await;
        twins.push(finish_all(loads.start(Some(TWIN_PARTS)), false).await?);
    }
    let mut failures = Vec::new();
    for (kind, shares) in [("announced", ANNOUNCED), ("unannounced", UNANNOUNCED)] {
        let memory = memory(&serving).await?;
        let running = loads.start(None);
        let each = settings.count(CHANGES, 40).div_ceil(names.len());
        let changing = names.iter().map(|name| change(&serving.server, name, shares, each, deadline));
        let done = join_all(changing).await;
        let with = finish_all(running, true).await?;
        let grown: Vec<i64> = memory_grown(&memory, &self::memory(&serving).await?);
        failures.extend(into_figures(figures, kind, &loads, (&with, &twins), &done));
        figures.set(&["partitions", kind, "memory_grown_mib"], grown);
        settle(&serving, &names, ANNOUNCED[0]).await;
    }
    serving.stop(figures).await?;
    if failures.is_empty() { Ok(()) } else { Err(StageError::Unusable(failures.join("; "))) }
}

/// Sets the share of all models. Ignores the errors of models that already have this share.
async fn settle(serving: &RunningServer, names: &[String], share: u32) {
    join_all(names.iter().map(|name| serving.server.resize_by_socket(name, share))).await;
}

/// Records the durations of the workers' starts, and the groups of the workers. Returns the models
/// whose share changes inside the worker.
async fn record_starts(
    serving: &RunningServer,
    figures: &mut FigureStore,
) -> Result<Vec<String>, StageError> {
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

/// Returns the memory of each worker in MiB, in the order in which the status lists the models.
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

/// The results of one model's share changes.
#[derive(Debug, Default)]
struct ShareChanges {
    /// The times from the request for a change to its answer, in ms. After the answer, the next
    /// batch runs at the new share.
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
    let mut tick = interval(CHANGE_INTERVAL);
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

/// Stores the figures, and returns the failures.
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

/// Measures the latency of the first model of [`PAIR`] under open-loop load in three situations:
/// alone, next to the hog on other groups, and next to the hog on the same groups.
async fn isolation(
    settings: &CheckSettings,
    figures: &mut FigureStore,
    models: &[MeasuredModel],
) -> Result<(), StageError> {
    let pair: Vec<MeasuredModel> =
        PAIR.iter().filter_map(|name| models.iter().find(|model| model.name == *name)).cloned().collect();
    let [quiet, hog] = &pair[..] else { return Ok(()) };
    let service =
        ServingOptions { name: "isolation", models: &pair, share: 20, batch: 8, handover: "in-process" };
    let serving = RunningServer::start(settings, service).await?;
    let subject = TestedModel::learn(&serving.server, &quiet.name).await?;
    let hog_model = TestedModel::learn(&serving.server, &hog.name).await?;
    let quiet_load =
        async || BackgroundLoad::start(&subject, QUIET_RATE, Some(QUIET_PARTS)).finish(false).await;
    serving.server.resize(&hog.name, 75).await?;
    // The first load only warms up the shapes and shares that the measurements use.
    quiet_load().await?;
    latencies(figures, "alone", &quiet_load().await?, None);
    for (what, shares) in [("apart", [20, 75]), ("together", [100, 100])] {
        for (model, share) in [quiet, hog].into_iter().zip(shares) {
            // `resize` returns an error if the model already has this share, so the error is
            // ignored.
            serving.server.resize(&model.name, share).await.ok();
        }
        let span = Duration::from_secs(2 * QUIET_PARTS + 1);
        let hog = hog_model.saturate(&serving.server, Saturation { rows: 1, in_flight: HOG_IN_FLIGHT }, span);
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

/// Checks that a half-precision model with a share by percentage is refused, and records the
/// reason.
async fn refusal(
    settings: &CheckSettings,
    figures: &mut FigureStore,
    half: &MeasuredModel,
) -> Result<(), StageError> {
    let models = std::slice::from_ref(half);
    let service = ServingOptions { name: "refusal", models, share: 60, batch: 8, handover: "shadow" };
    let server = ServerUnderTest::start(home(settings, service.name, &config(settings, service))?, None)?;
    let begun = Instant::now();
    let refused = timeout(REFUSAL_TIMEOUT, async {
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
    let model = refused.await.map_err(|_| {
        StageError::Unusable("the model in half precision became neither ready nor unready in time".into())
    })?;
    let why = model.more.get("why").cloned().unwrap_or_default();
    figures.set(
        &["partitions", "half_by_percentage"],
        json!({ "model": half.name, "state": model.state, "why": why,
        "seconds": rounded(begun.elapsed().as_secs_f64()) }),
    );
    server.stop().await?;
    Ok(())
}
