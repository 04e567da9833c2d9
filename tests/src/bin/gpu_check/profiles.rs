//! Execution times over batch sizes and shares, as `shadowslice profile` measures them.

use std::fs;
use std::time::Duration;

use serde_json::Value;
use tokio::process::Command;

use crate::error::{StageError, chain};
use crate::figures::FigureStore;
use crate::models::MeasuredModel;
use crate::stages::CheckStage;
use crate::tools::{CheckSettings, CheckedDevice, output};

/// How long one model may take, its reference answers on the CPU included.
const WITHIN: Duration = Duration::from_secs(240);

/// The shares, in percent.
const SHARES: &str = "6,12,20,30,45,60,80,100";

/// The shares of a quick run.
const QUICK_SHARES: &str = "12,30,100";

pub(crate) async fn run(setting: &CheckSettings, figures: &mut FigureStore) -> Result<(), StageError> {
    let mut faults = Vec::new();
    for model in &setting.models {
        if figures.has_model(CheckStage::Profiles, &model.name, setting.quick) {
            continue;
        }
        match measure(setting, figures, model).await {
            Ok(()) => figures.has_now(CheckStage::Profiles, &model.name, setting.quick)?,
            Err(error) => faults.push(format!("{}: {}", model.name, chain(&error))),
        }
    }
    if faults.is_empty() { Ok(()) } else { Err(StageError::Unusable(faults.join("; "))) }
}

async fn measure(
    setting: &CheckSettings,
    figures: &mut FigureStore,
    model: &MeasuredModel,
) -> Result<(), StageError> {
    let path = setting.out.join("profiles").join(format!("{}.yaml", model.name));
    let device = match &setting.device {
        CheckedDevice::Gpu(index) => index,
        CheckedDevice::Emulated => "emulated",
    };
    let mut command = Command::new(setting.supervisor());
    command.arg("profile").arg(&model.path).args(["--device", device, "--max-batch", "32"]);
    command.args(["--shares", if setting.quick { QUICK_SHARES } else { SHARES }]);
    command.args(["--runs", "15", "--seconds", "0.5", "--output"]).arg(&path);
    command.process_group(0);
    output(command, WITHIN, &setting.log(&format!("profile-{}", model.name))).await?;
    let text = fs::read_to_string(&path).map_err(StageError::io("read", &path))?;
    let text = attributed(setting, figures, &model.name, &text);
    fs::write(&path, &text).map_err(StageError::io("write", &path))?;
    figures.set(&["profiles", &model.name], text);
    Ok(())
}

/// Adds the device and memory of the measurement, where the profile itself does not name them.
fn attributed(setting: &CheckSettings, figures: &FigureStore, model: &str, text: &str) -> String {
    let line = |line: &str| match setting.device {
        CheckedDevice::Gpu(_) if line.starts_with("source:") => source(setting, figures),
        CheckedDevice::Gpu(_) if line.starts_with("memory:") => memory(figures, model),
        _ => line.to_owned(),
    };
    text.lines().map(|of| line(of) + "\n").collect()
}

/// A profile's line `source`.
pub(crate) fn source(setting: &CheckSettings, figures: &FigureStore) -> String {
    let said = |key| figures.get(&[key]).and_then(Value::as_str).unwrap_or("unknown").to_owned();
    match setting.device {
        CheckedDevice::Emulated => "source: {kind: illustrative}".into(),
        CheckedDevice::Gpu(_) => {
            let (device, driver, date) = (said("device"), said("driver"), said("date"));
            format!("source: {{kind: measured, device: {device:?}, driver: {driver:?}, date: {date:?}}}")
        }
    }
}

/// A profile's line `memory`, from the measurements of the stage sweep.
pub(crate) fn memory(figures: &FigureStore, model: &str) -> String {
    let mib = |part| figures.get(&["shadow_memory_mib", model, part]).and_then(Value::as_f64);
    let mib = |part| mib(part).map_or(0, |mib| mib.max(0.0) as u64);
    let (context, weights, activations) = (mib("context"), mib("weights"), mib("activations"));
    format!("memory: {{context: {context}Mi, weights: {weights}Mi, activations: {activations}Mi}}")
}
