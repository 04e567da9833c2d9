//! Many hand-overs of all models under load: nothing may be lost or wrong. Beside it a twin run.

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
use crate::traffic::{BackgroundLoad, LoadResult, RequestTimes, TestedModel};

/// Hand-overs of all models together,
const HANDOVERS: usize = 200;

/// and at least so many of each: some models start ten times as fast as others.
const OF_EACH: usize = 10;

/// Failures after which a model is handed over no more.
const FAILURES: usize = 5;

/// The shares that take turns, in percent.
const SHARES: [u32; 2] = [45, 30];

/// How long each capacity is measured.
const SATURATE: Duration = Duration::from_secs(3);

/// Requests under way of each model meanwhile.
const UNDER_WAY: usize = 16;

/// Parts of the load that the twin run repeats.
const TWIN_PARTS: u64 = 15;

/// The longest time of the twin run, which loads the same models for as long as the run with
/// changes, and then ends.
const TWIN: Duration = Duration::from_secs(45);

/// The models under load, and how much of it.
pub(crate) struct ModelLoads {
    pub(crate) subjects: Vec<Arc<TestedModel>>,
    /// Requests a second of each.
    pub(crate) rates: Vec<f64>,
}

impl ModelLoads {
    /// Half of the rate that each model carries while all models are saturated.
    pub(crate) async fn half(serving: &RunningServer, models: &[String]) -> Result<Self, StageError> {
        let learning = models.iter().map(|model| TestedModel::learn(&serving.server, model));
        let subjects: Vec<Arc<TestedModel>> = try_join_all(learning).await?;
        let saturating =
            subjects.iter().map(|subject| subject.saturate(&serving.server, (1, UNDER_WAY), SATURATE));
        let rates =
            try_join_all(saturating).await?.iter().map(|saturated| saturated.rows_per_s / 2.0).collect();
        Ok(Self { subjects, rates })
    }

    /// Starts them all.
    pub(crate) fn begin(&self, parts: Option<u64>) -> Vec<BackgroundLoad> {
        self.subjects
            .iter()
            .zip(&self.rates)
            .map(|(subject, &rate)| BackgroundLoad::begin(subject, rate, parts))
            .collect()
    }
}

/// Waits for the ends of loads.
pub(crate) async fn end_all(
    loads: Vec<BackgroundLoad>,
    at_once: bool,
) -> Result<Vec<LoadResult>, StageError> {
    try_join_all(loads.into_iter().map(|load| load.end(at_once))).await
}

pub(crate) async fn run(
    setting: &CheckSettings,
    figures: &mut FigureStore,
    end: Instant,
) -> Result<(), StageError> {
    let models = &setting.models;
    let service = ServingOptions { name: "lossless", models, share: SHARES[1], batch: 8, handover: "shadow" };
    let serving = RunningServer::start(setting, service).await?;
    let loads = ModelLoads::half(&serving, &setting.names()).await?;
    let wanted = HandoverTargets { of_all: setting.count(HANDOVERS, 20), of_each: setting.count(OF_EACH, 2) };

    let running = loads.begin(None);
    let begun = AtomicUsize::new(0);
    let deadline = end - STOPPING - TWIN;
    let resizing =
        loads.subjects.iter().map(|subject| hand_over(&serving, &subject.model, &begun, wanted, deadline));
    let done = join_all(resizing).await;
    let parts = running.iter().map(BackgroundLoad::parts).min().unwrap_or(0);
    let with = end_all(running, true).await?;
    into_figures(figures, &loads, &with, &done);
    figures.save()?;

    let twin = end_all(loads.begin(Some(parts.clamp(1, TWIN_PARTS))), false).await?;
    for ((subject, with), twin) in loads.subjects.iter().zip(&with).zip(&twin) {
        let p99 = json!({ "with": p99(&with.tally), "twin": p99(&twin.tally), "twin_requests": twin.tally.offered });
        figures.set(&["handovers", "p99_ms", &subject.model], p99);
    }
    record(setting, &loads, &done, [("with", &with[..]), ("twin", &twin[..])])?;
    serving.stop(figures).await?;
    judged(&with, &done, wanted)
}

fn p99(tally: &LoadTally) -> f64 {
    rounded(tally.latency_ms(0.99))
}

/// Writes the data beside the log that shows which requests were slow, and when: each request's
/// arrival and latency, and each hand-over's order and end with the parts of its worker's start.
/// Times are the system's clock, in microseconds.
fn record(
    setting: &CheckSettings,
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
            for RequestTimes { due, end } in spans {
                let (arrived, latency) = (at(*due), (*end - *due).as_micros());
                writeln!(lines, "{run},{model},{arrived},{latency}").expect("a string takes everything");
            }
        }
    }
    setting.keep("lossless.requests.csv", &lines)?;
    let mut lines = String::new();
    for (model, ModelHandovers { courses, .. }) in models().zip(done) {
        for ((ordered, ended), course) in courses {
            let line = json!({ "model": model, "ordered_us": at(*ordered) as u64, "ended_us": at(*ended) as u64,
                "course": course });
            writeln!(lines, "{line}").expect("a string takes everything");
        }
    }
    setting.keep("lossless.handovers.jsonl", &lines)
}

/// The outcome of one model's hand-overs.
#[derive(Debug, Default)]
struct ModelHandovers {
    effects_ms: Vec<f64>,
    stalls_us: Vec<f64>,
    /// Each as it went, from its order to its effect.
    courses: Vec<(TimeWindow, Value)>,
    failed: Vec<String>,
}

/// How many hand-overs there shall be.
#[derive(Debug, Clone, Copy)]
struct HandoverTargets {
    of_all: usize,
    of_each: usize,
}

/// Hands a model over again and again until as many as are wanted have begun.
async fn hand_over(
    serving: &RunningServer,
    model: &str,
    begun: &AtomicUsize,
    wanted: HandoverTargets,
    deadline: Instant,
) -> ModelHandovers {
    let mut done = ModelHandovers::default();
    for n in 0.. {
        let enough = begun.fetch_add(1, Ordering::Relaxed) >= wanted.of_all && n >= wanted.of_each;
        if enough || done.failed.len() >= FAILURES || Instant::now() > deadline {
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

/// Fails where a request was lost or wrong, or a hand-over not carried out.
fn judged(with: &[LoadResult], done: &[ModelHandovers], wanted: HandoverTargets) -> Result<(), StageError> {
    let HandoverTargets { of_all, of_each } = wanted;
    let completed: usize = done.iter().map(|done| done.stalls_us.len()).sum();
    let fewest = done.iter().map(|done| done.stalls_us.len()).min().unwrap_or(0);
    let lost: u64 = with.iter().map(|loaded| loaded.tally.failures()).sum();
    let wrong: u64 = with.iter().map(|loaded| loaded.tally.wrong).sum();
    let undone: Vec<&String> = done.iter().flat_map(|done| &done.failed).collect();
    if lost + wrong == 0 && completed >= of_all && fewest >= of_each {
        return Ok(());
    }
    let why = format!(
        "{completed} hand-overs of {of_all}, {fewest} of {of_each} of the model with fewest; {lost} requests lost, {wrong} wrong; \
         not done: {undone:?}"
    );
    Err(StageError::Unusable(why))
}
