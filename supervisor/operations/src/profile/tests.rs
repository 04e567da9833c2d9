use std::time::Duration;

use clap::Parser;
use shadowslice_shared::units::Sms;

use super::*;

fn column(sms: u32, ms: &[f64]) -> ShareMeasurement {
    let ms = [1, 2, 4].into_iter().zip(ms.iter().copied()).collect();
    let boot = BootMs { spawn: f64::from(200 - sms), ..BootMs::default() };
    ShareMeasurement { sms: Sms(sms), ms, boot, memory: ProcessMemory::default() }
}

#[test]
fn a_written_profile_reads_as_the_measured_one() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    file(
        "given.yaml",
        "{source: {kind: measured, device: \"a: b\", driver: \"580\", date: 2026-11-20}, memory: {context: 400Mi}, execution_ms: {sms: [132], 1: [3.0]}}",
    );
    let config = |profile: &str| {
        let text = format!(
            "{{gpus: [{{device: emulated, sms: 132}}], models: [{{name: m, engine: emulated, slo: 1s, profile: {profile}, tensors: [{{input: x, output: y, datatype: FP32, shape: [1]}}]}}]}}"
        );
        let path = file("config.yaml", &text);
        config::load(&path, &|name| (name == "XDG_RUNTIME_DIR").then(|| "/run".into()), false).unwrap()
    };
    let model = config("given.yaml").models.remove(0);
    let columns = vec![column(8, &[9.0, 17.5, 33.25]), column(132, &[1.0, 1.5, 2.125])];
    let profile = assemble(&model, columns, None).unwrap();
    assert_eq!(profile.start.process, Duration::from_millis(192), "the slowest start");
    file("written.yaml", &yaml::write(&profile, "A comment.\nIn two lines."));
    assert_eq!(config("written.yaml").models[0].profile.as_ref(), Some(&profile));
}

#[derive(Debug, clap::Parser)]
struct Command {
    #[command(flatten)]
    options: ProfileOptions,
}

#[test]
fn a_profile_that_could_not_be_written_is_not_measured() {
    let arguments = ["profile", "model.onnx", "--device", "emulated", "-o", "/nowhere/model.yaml"];
    let options = Command::parse_from(arguments).options;
    let fault = measure(&options).unwrap_err();
    assert!(matches!(fault, ProfileError::NoOutput(..)), "{fault:?}");
    assert_eq!(fault.code(), exit::UNAVAILABLE);
    let why = errors::chain(&fault);
    assert!(why.contains("/nowhere/model.yaml, so nothing was measured; create the folder"), "{why}");
}
