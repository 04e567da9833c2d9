//! Where the time of a hand-over goes, model by model.

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

/// Hand-overs of each model.
const HANDOVERS: usize = 5;

/// The shares that take turns, in percent.
const SHARES: [u32; 2] = [60, 30];

/// The load meanwhile, in requests a second.
const RATE: f64 = 20.0;

pub(crate) async fn run(setting: &CheckSettings, figures: &mut FigureStore) -> Result<(), StageError> {
    for model in &setting.models {
        if figures.has_model(CheckStage::Handover, &model.name, setting.quick) {
            continue;
        }
        let models = std::slice::from_ref(model);
        let name = format!("handover-{}", model.name);
        let serving = RunningServer::start(
            setting,
            ServingOptions { name: &name, models, share: 50, batch: 8, handover: "shadow" },
        )
        .await?;
        let handovers = of_model(setting, &serving, model).await?;
        into_figures(figures, &model.name, &handovers);
        serving.stop(figures).await?;
        figures.has_now(CheckStage::Handover, &model.name, setting.quick)?;
    }
    Ok(())
}

async fn of_model(
    setting: &CheckSettings,
    serving: &RunningServer,
    model: &MeasuredModel,
) -> Result<Vec<HandoverResult>, StageError> {
    let subject = TestedModel::learn(&serving.server, &model.name).await?;
    let load = BackgroundLoad::begin(&subject, RATE, None);
    let mut handovers = Vec::new();
    for n in 0..setting.count(HANDOVERS, 2) {
        handovers.push(serving.hand_over(&model.name, SHARES[n % 2]).await?);
        serving.alone(&model.name).await?;
    }
    let tally = load.end(true).await?.tally;
    let (lost, wrong) = (tally.failures(), tally.wrong);
    if lost + wrong > 0 {
        let why = format!(
            "{lost} of {} lost {:?}, {wrong} wrong {:?}",
            tally.offered, tally.failed, tally.examples
        );
        return Err(StageError::Request { model: model.name.clone(), why });
    }
    Ok(handovers)
}

/// Stores the medians and the values that they come from.
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

/// Stalls are few and short, so all of them are kept; a later run of the same kind replaces its own.
pub(crate) fn add_stalls(figures: &mut FigureStore, of: &str, stalls_us: &[f64]) {
    figures.set(&["raw", "stall_us", of], stalls_us);
    let all = figures.get(&["raw", "stall_us"]).and_then(Value::as_object);
    let all = all.into_iter().flatten().filter_map(|(_, stalls)| stalls.as_array()).flatten();
    let all: Vec<f64> = all.filter_map(Value::as_f64).collect();
    figures.set(&["stall_us"], summary(&all));
}
