//! The stage `pairs`, which measures how much the models of each pair slow each other down. Both
//! models have a share of 50 % and are saturated.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::try_join_all;
use serde_json::Value;

use crate::error::StageError;
use crate::figures::FigureStore;
use crate::numbers::rounded;
use crate::serving::{RunningServer, ServingOptions};
use crate::tools::CheckSettings;
use crate::traffic::{Saturation, TestedModel};

/// The share of each model, in percent.
const SHARE: u32 = 50;

/// The number of rows in each request. A single request fills a batch.
const ROWS: u32 = 8;

/// The number of requests in flight per model: one executes, one is queued, and one is in transit.
const IN_FLIGHT: usize = 3;

/// The time for which each model and each pair runs.
const SPAN: Duration = Duration::from_millis(2500);

/// The throughput of a saturated model, and the execution time of its batches.
#[derive(Debug, Clone, Copy)]
struct Throughput {
    rows_per_s: f64,
    execution_ms: Option<f64>,
}

pub(crate) async fn run(settings: &CheckSettings, figures: &mut FigureStore) -> Result<(), StageError> {
    let service = ServingOptions {
        name: "pairs",
        models: &settings.models,
        share: SHARE,
        batch: ROWS,
        handover: "shadow",
    };
    let serving = RunningServer::start(settings, service).await?;
    let learning = settings.models.iter().map(|model| TestedModel::learn(&serving.server, &model.name));
    let subjects: Vec<Arc<TestedModel>> = try_join_all(learning).await?;
    let mut alone = Vec::new();
    for subject in &subjects {
        let pace = together(&serving, &[subject]).await?.remove(0);
        figures.set(&["alone_rows_per_s", &subject.model], rounded(pace.rows_per_s));
        alone.push(pace);
    }
    for first in 0..subjects.len() {
        for second in first + 1..subjects.len() {
            let beside = together(&serving, &[&subjects[first], &subjects[second]]).await?;
            for (pace, of, with) in [(beside[0], first, second), (beside[1], second, first)] {
                let path = |table| [table, subjects[of].model.as_str(), subjects[with].model.as_str()];
                let slower = alone[of].rows_per_s / pace.rows_per_s;
                figures.set(&path("pair_slowdown"), rounded(slower));
                let longer = pace.execution_ms.zip(alone[of].execution_ms).map(|(with, alone)| with / alone);
                figures.set(&path("pair_execution_slowdown"), longer.map(rounded));
            }
        }
    }
    serving.stop(figures).await
}

/// Saturates several models at the same time.
async fn together(
    serving: &RunningServer,
    subjects: &[&Arc<TestedModel>],
) -> Result<Vec<Throughput>, StageError> {
    let one = async |subject: &Arc<TestedModel>| {
        let saturated =
            subject.saturate(&serving.server, Saturation { rows: ROWS, in_flight: IN_FLIGHT }, SPAN).await?;
        let execution_ms = execution_ms(serving, &subject.model, ROWS).await?;
        Ok::<_, StageError>(Throughput { rows_per_s: saturated.rows_per_s, execution_ms })
    };
    try_join_all(subjects.iter().map(|subject| one(subject))).await
}

/// Returns the recent execution time of batches of this size in ms, from the supervisor's status.
pub(crate) async fn execution_ms(
    serving: &RunningServer,
    model: &str,
    rows: u32,
) -> Result<Option<f64>, StageError> {
    let model = serving.server.model(model).await?;
    let times = model.more.get("execution_ms");
    Ok(times.and_then(|times| times.get(rows.to_string())).and_then(Value::as_f64))
}
