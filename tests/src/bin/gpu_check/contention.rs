//! The stage `contention`, which measures how much one model slows down another model's batches.
//! The shares of the two models place them on the same groups of SMs, on disjoint groups, or on
//! overlapping groups.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use crate::error::StageError;
use crate::figures::FigureStore;
use crate::models::MeasuredModel;
use crate::numbers::{mean, quantile, rounded};
use crate::pairs::execution_ms;
use crate::serving::{RunningServer, ServingOptions};
use crate::tools::CheckSettings;
use crate::traffic::{Saturation, TestedModel};

/// The pairs of models. The stage measures the first model while the second model is saturated.
const PAIRS: [[&str; 2]; 4] =
    [["resnet50", "vgg19"], ["resnet50", "bert-base"], ["mobilenet-v2", "vgg19"], ["bert-base", "resnet50"]];

/// The shares of the two models, in percent.
const SHARES: [[u32; 2]; 10] = [
    [100, 100],
    [50, 100],
    [25, 100],
    [13, 100],
    [100, 75],
    [100, 50],
    [75, 75],
    [50, 75],
    [25, 75],
    [50, 50],
];

/// The maximum batch size, in rows, and the sizes of the measured requests, in rows. The measured
/// requests are sent one at a time, so that no request is queued.
const BATCHES: [(u32, &[u32]); 2] = [(16, &[1, 8]), (2, &[1])];

/// The number of the second model's requests in flight: one executes, one is queued, and one is in
/// transit.
const IN_FLIGHT: usize = 3;

/// The duration of each measurement.
const SPAN: Duration = Duration::from_millis(500);

pub(crate) async fn run(settings: &CheckSettings, figures: &mut FigureStore) -> Result<(), StageError> {
    for names in PAIRS {
        let found = names.map(|name| settings.models.iter().find(|model| model.name == name).cloned());
        if let [Some(one), Some(other)] = found {
            let models = [one, other];
            let mut measured = Vec::new();
            for (batch, rows) in BATCHES {
                measured.extend(pair(settings, figures, &models, batch, rows).await?);
            }
            figures.set(&["contention", &names.join(" beside ")], measured);
            figures.save()?;
        }
    }
    Ok(())
}

/// Measures one pair of models, whose batches have at most `batch` rows.
async fn pair(
    settings: &CheckSettings,
    figures: &mut FigureStore,
    models: &[MeasuredModel],
    batch: u32,
    rows: &[u32],
) -> Result<Vec<Value>, StageError> {
    let service = ServingOptions { name: "contention", models, share: 50, batch, handover: "in-process" };
    let serving = RunningServer::start(settings, service).await?;
    let one = TestedModel::learn(&serving.server, &models[0].name).await?;
    let other = TestedModel::learn(&serving.server, &models[1].name).await?;
    let mut measured = Vec::new();
    let mut alone: BTreeMap<(u32, u32), f64> = BTreeMap::new();
    for [own, others] in SHARES {
        for (subject, share) in [(&one, own), (&other, others)] {
            // `resize` returns an error if the model already has this share, so the error is
            // ignored.
            serving.server.resize(&subject.model, share).await.ok();
        }
        for &rows in rows {
            if let Entry::Vacant(vacant) = alone.entry((own, rows)) {
                vacant.insert(latency(&serving, &one, rows).await?);
            }
            let of = json!({ "share": own, "others_share": others, "rows": rows, "others_rows": batch,
                "alone_ms": rounded(alone[&(own, rows)]) });
            measured.push(merged(of, beside(&serving, [&one, &other], rows, batch).await?));
        }
    }
    serving.stop(figures).await?;
    Ok(measured)
}

/// Returns the mean latency in ms of requests that are sent one by one.
async fn latency(serving: &RunningServer, one: &Arc<TestedModel>, rows: u32) -> Result<f64, StageError> {
    let result = one.saturate(&serving.server, Saturation { rows, in_flight: 1 }, SPAN).await?;
    Ok(mean(&result.latencies_ms).map_or(f64::NAN, |(mean, _)| mean))
}

/// Measures the latency of one model's requests while the other model is saturated.
async fn beside(
    serving: &RunningServer,
    [one, other]: [&Arc<TestedModel>; 2],
    rows: u32,
    others_rows: u32,
) -> Result<Value, StageError> {
    let inputs = one.client_inputs(Saturation { rows, in_flight: 1 })?;
    let others_inputs = other.client_inputs(Saturation { rows: others_rows, in_flight: IN_FLIGHT })?;
    let hog = other.saturate_with(&serving.server, &others_inputs, SPAN + SPAN / 4);
    let (hog, result) = tokio::join!(hog, one.saturate_with(&serving.server, &inputs, SPAN));
    let (result, hog) = (result?, hog?);
    let execution = execution_ms(serving, &other.model, others_rows).await?;
    let of = |part| quantile(&result.latencies_ms, part).map(rounded);
    let groups = serving.server.model(&one.model).await?.groups;
    let others_groups = serving.server.model(&other.model).await?.groups;
    Ok(json!({
        "mean_ms": mean(&result.latencies_ms).map(|(mean, _)| rounded(mean)), "p50_ms": of(0.5), "p99_ms": of(0.99),
        "others_batches_per_s": rounded(hog.rows_per_s / f64::from(others_rows)), "others_execution_ms": execution,
        "groups": groups, "others_groups": others_groups,
    }))
}

fn merged(mut one: Value, other: Value) -> Value {
    if let (Some(one), Value::Object(other)) = (one.as_object_mut(), other) {
        one.extend(other);
    }
    one
}
