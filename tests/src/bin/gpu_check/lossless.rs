//! The stage `lossless`, which runs many hand-overs of all models under load. No request may be
//! lost or answered wrongly. For comparison, a twin run repeats the load without hand-overs.

use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::future::{join_all, try_join_all};
use serde_json::{Value, json};
use shadowslice_tests::load::LoadTally;
use tokio::time::Instant;

use crate::error::{StageError, chain};
use crate::figures::FigureStore;
use crate::handover::add_stalls;
use crate::neighbours::TimeWindow;
use crate::numbers::rounded;
use crate::serving::{RunningServer, ServingOptions};
use crate::stages::STOPPING;
use crate::tools::CheckSettings;
use crate::traffic::{BackgroundLoad, LoadResult, Saturation, TestedModel, TrafficTimes};

/// The minimum number of hand-overs of all models together.
const HANDOVERS: usize = 200;

/// The minimum number of hand-overs of each model. Without this minimum, models that start ten
/// times as fast as others would get nearly all hand-overs.
const MIN_PER_MODEL: usize = 10;

/// The number of failures after which a model gets no further hand-overs.
const MAX_FAILURES: usize = 5;

/// The shares between which hand-overs alternate, in percent.
const SHARES: [u32; 2] = [45, 30];

/// The time for which the models' capacity is measured.
const SATURATE: Duration = Duration::from_secs(3);

/// The number of requests in flight per model while the capacity is measured.
const IN_FLIGHT: usize = 16;

/// The maximum number of parts of the load in the twin run.
const TWIN_PARTS: u64 = 15;

/// The time that the stage reserves for the twin run.
const TWIN: Duration = Duration::from_secs(45);

/// The models under load, and their rates.
pub(crate) struct ModelLoads {
    pub(crate) subjects: Vec<Arc<TestedModel>>,
    /// The rate of each model, in requests per second.
    pub(crate) rates: Vec<f64>,
}

impl ModelLoads {
    /// Measures the throughput of each model while all models are saturated. Returns loads whose
    /// rates are half of that throughput.
    pub(crate) async fn half(serving: &RunningServer, models: &[String]) -> Result<Self, StageError> {
        let learning = models.iter().map(|model| TestedModel::learn(&serving.server, model));
        let subjects: Vec<Arc<TestedModel>> = try_join_all(learning).await?;
        let saturating = subjects.iter().map(|subject| {
            subject.saturate(&serving.server, Saturation { rows: 1, in_flight: IN_FLIGHT }, SATURATE)
        });
        let rates =
            try_join_all(saturating).await?.iter().map(|saturated| saturated.rows_per_s / 2.0).collect();
        Ok(Self { subjects, rates })
    }

    /// Starts the loads of all models.
    pub(crate) fn start(&self, parts: Option<u64>) -> Vec<BackgroundLoad> {
        self.subjects
            .iter()
            .zip(&self.rates)
            .map(|(subject, &rate)| BackgroundLoad::start(subject, rate, parts))
            .collect()
    }
}

/// Waits until all loads have ended. If `at_once` is true, the loads end after their current part.
pub(crate) async fn finish_all(
    loads: Vec<BackgroundLoad>,
    at_once: bool,
) -> Result<Vec<LoadResult>, StageError> {
    try_join_all(loads.into_iter().map(|load| load.finish(at_once))).await
}

pub(crate) async fn run(
    settings: &CheckSettings,
    figures: &mut FigureStore,
    end: Instant,
) -> Result<(), StageError> {
    let models = &settings.models;
    let service = ServingOptions { name: "lossless", models, share: SHARES[1], batch: 8, handover: "shadow" };
    let serving = RunningServer::start(settings, service).await?;
    let loads = ModelLoads::half(&serving, &settings.names()).await?;
    let wanted =
        HandoverTargets { total: settings.count(HANDOVERS, 20), per_model: settings.count(MIN_PER_MODEL, 2) };

    let running = loads.start(None);
    let begun = AtomicUsize::new(0);
    let deadline = end - STOPPING - TWIN;
    let resizing =
        loads.subjects.iter().map(|subject| hand_over(&serving, &subject.model, &begun, wanted, deadline));
    let done = join_all(resizing).await;
    let parts = running.iter().map(BackgroundLoad::parts).min().unwrap_or(0);
    let with = finish_all(running, true).await?;
    into_figures(figures, &loads, &with, &done);
    figures.save()?;

    let twin = finish_all(loads.start(Some(parts.clamp(1, TWIN_PARTS))), false).await?;
    for ((subject, with), twin) in loads.subjects.iter().zip(&with).zip(&twin) {
        let p99 = json!({ "with": p99(&with.tally), "twin": p99(&twin.tally), "twin_requests": twin.tally.offered });
        figures.set(&["handovers", "p99_ms", &subject.model], p99);
    }
    record(settings, &loads, &done, [("with", &with[..]), ("twin", &twin[..])])?;
    serving.stop(figures).await?;
    verdict(&with, &done, wanted)
}

fn p99(tally: &LoadTally) -> f64 {
    rounded(tally.latency_ms(0.99))
}

/// Writes two files next to the log. The first file contains the arrival and latency of each
/// request. The second file contains the start and end of each hand-over, with the start phases of
/// its worker. Together, the files show which requests were slow, and when. Times are those of the
/// system clock, in microseconds.
fn record(
    settings: &CheckSettings,
    loads: &ModelLoads,
    done: &[ModelHandovers],
    runs: [(&str, &[LoadResult]); 2],
) -> Result<(), StageError> {
    let (now, today) = (Instant::now(), SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default());
    let at = |moment: Instant| (today - (now - moment)).as_micros();
    let models = || loads.subjects.iter().map(|subject| &subject.model);
    let mut lines = String::from("run,model,arrived_us,latency_us\n");
    for (run, loaded) in runs {
        for (model, LoadResult { spans, .. }) in models().zip(loaded) {
            for TrafficTimes { due, end } in spans {
                let (arrived, latency) = (at(*due), (*end - *due).as_micros());
                writeln!(lines, "{run},{model},{arrived},{latency}")
                    .expect("writing to a string cannot fail");
            }
        }
    }
    settings.write_beside_logs("lossless.requests.csv", &lines)?;
    let mut lines = String::new();
    for (model, ModelHandovers { courses, .. }) in models().zip(done) {
        for ((ordered, ended), course) in courses {
            let line = json!({ "model": model, "ordered_us": at(*ordered) as u64, "ended_us": at(*ended) as u64,
                "course": course });
            writeln!(lines, "{line}").expect("writing to a string cannot fail");
        }
    }
    settings.write_beside_logs("lossless.handovers.jsonl", &lines)
}

/// The results of one model's hand-overs.
#[derive(Debug, Default)]
struct ModelHandovers {
    effects_ms: Vec<f64>,
    stalls_us: Vec<f64>,
    /// The time window and the figures of each hand-over. The window extends from the request for
    /// the hand-over to its effect.
    courses: Vec<(TimeWindow, Value)>,
    failed: Vec<String>,
}

/// The minimum number of hand-overs, for all models together and for each model.
#[derive(Debug, Clone, Copy)]
struct HandoverTargets {
    total: usize,
    per_model: usize,
}

/// Repeats the hand-over of a model until enough hand-overs have started.
async fn hand_over(
    serving: &RunningServer,
    model: &str,
    begun: &AtomicUsize,
    wanted: HandoverTargets,
    deadline: Instant,
) -> ModelHandovers {
    let mut done = ModelHandovers::default();
    for n in 0.. {
        let enough = begun.fetch_add(1, Ordering::Relaxed) >= wanted.total && n >= wanted.per_model;
        if enough || done.failed.len() >= MAX_FAILURES || Instant::now() > deadline {
            break;
        }
        let ordered = Instant::now();
        match serving.hand_over(model, SHARES[n % 2]).await {
            Ok(handed) => {
                done.courses.push(((ordered, Instant::now()), handed.json()));
                done.effects_ms.extend(handed.handover.effect_ms);
                done.stalls_us.push(handed.handover.stall_us.unwrap_or(0.0));
            }
            Err(error) => done.failed.push(chain(&error)),
        }
    }
    done
}

fn into_figures(figures: &mut FigureStore, loads: &ModelLoads, with: &[LoadResult], done: &[ModelHandovers]) {
    let sum = |of: fn(&LoadTally) -> u64| with.iter().map(|loaded| of(&loaded.tally)).sum::<u64>();
    let completed: usize = done.iter().map(|done| done.stalls_us.len()).sum();
    let failed: Vec<&String> = done.iter().flat_map(|done| &done.failed).collect();
    figures.set(&["handovers", "done"], completed);
    figures.set(&["handovers", "not_done"], json!(failed));
    figures.set(&["handovers", "offered"], sum(|tally| tally.offered));
    figures.set(&["handovers", "lost"], sum(LoadTally::failures));
    figures.set(&["handovers", "wrong"], sum(|tally| tally.wrong));
    let each = loads.subjects.iter().zip(&loads.rates).zip(with).zip(done);
    for (((subject, rate), LoadResult { tally, .. }), done) in each {
        let of: Value = json!({ "done": done.stalls_us.len(), "rate": rounded(*rate), "offered": tally.offered,
            "lost": tally.failed, "wrong": tally.wrong, "examples": tally.examples, "effects_ms": done.effects_ms,
            "sent_late_ms": rounded(tally.sent_late_ms(1.0)) });
        figures.set(&["handovers", "models", &subject.model], of);
    }
    let stalls: Vec<f64> = done.iter().flat_map(|done| done.stalls_us.iter().copied()).collect();
    add_stalls(figures, "lossless", &stalls);
}

/// Returns an error if a request was lost or answered wrongly, or if there were too few hand-overs.
fn verdict(with: &[LoadResult], done: &[ModelHandovers], wanted: HandoverTargets) -> Result<(), StageError> {
    let HandoverTargets { total, per_model } = wanted;
    let completed: usize = done.iter().map(|done| done.stalls_us.len()).sum();
    let fewest = done.iter().map(|done| done.stalls_us.len()).min().unwrap_or(0);
    let lost: u64 = with.iter().map(|loaded| loaded.tally.failures()).sum();
    let wrong: u64 = with.iter().map(|loaded| loaded.tally.wrong).sum();
    let undone: Vec<&String> = done.iter().flat_map(|done| &done.failed).collect();
    if lost + wrong == 0 && completed >= total && fewest >= per_model {
        return Ok(());
    }
    let why = format!(
        "{completed} of {total} hand-overs, {fewest} of {per_model} for the model with the fewest; {lost} requests lost, {wrong} answered wrongly; \
         failed: {undone:?}"
    );
    Err(StageError::Unusable(why))
}
