//! Fuzz tests: every configuration and every profile either loads or is reported as faulty. `cargo
//! bolero test NAME` runs one test until you stop it.

use std::fs;
use std::path::Path;

const USING: &str = "gpus: [{device: emulated}]\nmodels: [{name: m, engine: emulated, slo: 5ms, \
    profile: profile.yaml, tensors: [{input: x, output: y, datatype: FP32, shape: [1]}]}]\n";

fn load(path: &Path) {
    if let Err(error) = shadowslice_config::load(path, &|_| Some("/run".into()), true) {
        assert!(!error.to_string().is_empty());
    }
}

#[test]
fn yaml() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.yaml");
    bolero::check!().for_each(|bytes: &[u8]| {
        fs::write(&path, bytes).unwrap();
        load(&path);
    });
}

#[test]
fn profile() {
    let folder = tempfile::tempdir().unwrap();
    let [config, profile] = ["config.yaml", "profile.yaml"].map(|name| folder.path().join(name));
    fs::write(&config, USING).unwrap();
    bolero::check!().for_each(|bytes: &[u8]| {
        fs::write(&profile, bytes).unwrap();
        load(&config);
    });
}
