//! The stage `profiles`, in which `shadowslice profile` measures execution times by batch size and
//! share.

use std::fs;
use std::time::Duration;

use serde_json::Value;
use tokio::process::Command;

use crate::error::{StageError, chain};
use crate::figures::FigureStore;
use crate::models::MeasuredModel;
use crate::stages::CheckStage;
use crate::tools::{CheckSettings, CheckedDevice, output};

/// The time limit for one model, which includes the computation of its reference answers on the
/// CPU.
const PROFILE_TIMEOUT: Duration = Duration::from_secs(240);

/// The measured shares, in percent.
const SHARES: &str = "6,12,20,30,45,60,80,100";

/// The shares of a quick run, in percent.
const QUICK_SHARES: &str = "12,30,100";

pub(crate) async fn run(settings: &CheckSettings, figures: &mut FigureStore) -> Result<(), StageError> {
    let mut failures = Vec::new();
    for model in &settings.models {
        if figures.has_model(CheckStage::Profiles, &model.name, settings.quick) {
            continue;
        }
        match measure(settings, figures, model).await {
            Ok(()) => figures.record_model(CheckStage::Profiles, &model.name, settings.quick)?,
            Err(error) => failures.push(format!("{}: {}", model.name, chain(&error))),
        }
    }
    if failures.is_empty() { Ok(()) } else { Err(StageError::Unusable(failures.join("; "))) }
}

async fn measure(
    settings: &CheckSettings,
    figures: &mut FigureStore,
    model: &MeasuredModel,
) -> Result<(), StageError> {
    let path = settings.out.join("profiles").join(format!("{}.yaml", model.name));
    let device = match &settings.device {
        CheckedDevice::Gpu(index) => index,
        CheckedDevice::Emulated => "emulated",
    };
    let mut command = Command::new(settings.supervisor());
    command.arg("profile").arg(&model.path).args(["--device", device, "--max-batch", "32"]);
    command.args(["--shares", if settings.quick { QUICK_SHARES } else { SHARES }]);
    command.args(["--runs", "15", "--seconds", "0.5", "--output"]).arg(&path);
    command.process_group(0);
    output(command, PROFILE_TIMEOUT, &settings.log(&format!("profile-{}", model.name))).await?;
    let text = fs::read_to_string(&path).map_err(StageError::io("read", &path))?;
    let text = with_source_and_memory(settings, figures, &model.name, &text);
    fs::write(&path, &text).map_err(StageError::io("write", &path))?;
    figures.set(&["profiles", &model.name], text);
    Ok(())
}

/// Replaces the lines `source` and `memory` of a profile by this check's device and the memory that
/// the stage `sweep` measured.
fn with_source_and_memory(
    settings: &CheckSettings,
    figures: &FigureStore,
    model: &str,
    text: &str,
) -> String {
    let line = |line: &str| match settings.device {
        CheckedDevice::Gpu(_) if line.starts_with("source:") => source(settings, figures),
        CheckedDevice::Gpu(_) if line.starts_with("memory:") => memory(figures, model),
        _ => line.to_owned(),
    };
    text.lines().map(|old| line(old) + "\n").collect()
}

/// Returns the line `source` of a profile.
pub(crate) fn source(settings: &CheckSettings, figures: &FigureStore) -> String {
    let figure = |key| figures.get(&[key]).and_then(Value::as_str).unwrap_or("unknown").to_owned();
    match settings.device {
        CheckedDevice::Emulated => "source: {kind: illustrative}".into(),
        CheckedDevice::Gpu(_) => {
            let (device, driver, date) = (figure("device"), figure("driver"), figure("date"));
            format!("source: {{kind: measured, device: {device:?}, driver: {driver:?}, date: {date:?}}}")
        }
    }
}

/// Returns the line `memory` of a profile, from the figures of the stage `sweep`.
pub(crate) fn memory(figures: &FigureStore, model: &str) -> String {
    let mib = |part| figures.get(&["shadow_memory_mib", model, part]).and_then(Value::as_f64);
    let mib = |part| mib(part).map_or(0, |mib| mib.max(0.0) as u64);
    let (context, weights, activations) = (mib("context"), mib("weights"), mib("activations"));
    format!("memory: {{context: {context}Mi, weights: {weights}Mi, activations: {activations}Mi}}")
}
