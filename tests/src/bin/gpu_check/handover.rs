//! The stage `handover`, which measures the phases of a hand-over for each model.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::error::StageError;
use crate::figures::FigureStore;
use crate::models::MeasuredModel;
use crate::numbers::{median, rounded, summary};
use crate::serving::{HandoverResult, RunningServer, ServingOptions};
use crate::stages::CheckStage;
use crate::tools::CheckSettings;
use crate::traffic::{BackgroundLoad, TestedModel};

/// The number of hand-overs of each model.
const HANDOVERS: usize = 5;

/// The shares between which hand-overs alternate, in percent.
const SHARES: [u32; 2] = [60, 30];

/// The rate of the load, in requests per second.
const RATE: f64 = 20.0;

pub(crate) async fn run(settings: &CheckSettings, figures: &mut FigureStore) -> Result<(), StageError> {
    for model in &settings.models {
        if figures.has_model(CheckStage::Handover, &model.name, settings.quick) {
            continue;
        }
        let models = std::slice::from_ref(model);
        let name = format!("handover-{}", model.name);
        let serving = RunningServer::start(
            settings,
            ServingOptions { name: &name, models, share: 50, batch: 8, handover: "shadow" },
        )
        .await?;
        let handovers = hand_over_model(settings, &serving, model).await?;
        into_figures(figures, &model.name, &handovers);
        serving.stop(figures).await?;
        figures.record_model(CheckStage::Handover, &model.name, settings.quick)?;
    }
    Ok(())
}

async fn hand_over_model(
    settings: &CheckSettings,
    serving: &RunningServer,
    model: &MeasuredModel,
) -> Result<Vec<HandoverResult>, StageError> {
    let subject = TestedModel::learn(&serving.server, &model.name).await?;
    let load = BackgroundLoad::start(&subject, RATE, None);
    let mut handovers = Vec::new();
    for n in 0..settings.count(HANDOVERS, 2) {
        handovers.push(serving.hand_over(&model.name, SHARES[n % 2]).await?);
        serving.wait_single_worker(&model.name).await?;
    }
    let tally = load.finish(true).await?.tally;
    let (lost, wrong) = (tally.failures(), tally.wrong);
    if lost + wrong > 0 {
        let why = format!(
            "{lost} of {} requests lost {:?}, {wrong} answers wrong {:?}",
            tally.offered, tally.failed, tally.examples
        );
        return Err(StageError::Request { model: model.name.clone(), why });
    }
    Ok(handovers)
}

/// Stores the median time of each phase, and the times of every hand-over.
fn into_figures(figures: &mut FigureStore, model: &str, handovers: &[HandoverResult]) {
    let raw: Vec<Value> = handovers.iter().map(HandoverResult::json).collect();
    let mut samples: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    for handover in &raw {
        for (part, ms) in handover["boot_ms"].as_object().into_iter().flatten() {
            samples.entry(part.clone()).or_default().extend(ms.as_f64());
        }
        samples.entry("effect".into()).or_default().extend(handover["effect_ms"].as_f64());
    }
    for (part, sample) in samples {
        figures.set(&["handover_ms", model, &part], median(&sample).map(rounded));
    }
    let stalls: Vec<f64> = handovers.iter().filter_map(|handover| handover.handover.stall_us).collect();
    figures.set(&["raw", "handover", model], raw);
    add_stalls(figures, model, &stalls);
}

/// Adds the stalls of one kind of hand-over to the figures. Replaces the stalls of this kind from
/// an earlier run.
pub(crate) fn add_stalls(figures: &mut FigureStore, kind: &str, stalls_us: &[f64]) {
    figures.set(&["raw", "stall_us", kind], stalls_us);
    let all = figures.get(&["raw", "stall_us"]).and_then(Value::as_object);
    let all = all.into_iter().flatten().filter_map(|(_, stalls)| stalls.as_array()).flatten();
    let all: Vec<f64> = all.filter_map(Value::as_f64).collect();
    figures.set(&["stall_us"], summary(&all));
}
