//! Tests of reading a version of a model again.

use std::fs;

use super::*;
use crate::apply_client_changes;
use crate::types::EngineConfig;

const NO_OPERATORS: &[u8] = b"\x08\x09\x3a\x07\x12\x05graph";

/// Returns a configuration with a model `v`, whose path is a folder of versions, a model `s` with a single
/// file, and an emulated model `e`.
fn config() -> (tempfile::TempDir, Config) {
    let dir = tempfile::tempdir().unwrap();
    for number in ["1", "2", "3"] {
        fs::create_dir_all(dir.path().join("v").join(number)).unwrap();
    }
    fs::write(dir.path().join("v/1/model.onnx"), NO_OPERATORS).unwrap();
    fs::write(dir.path().join("v/3/model.onnx"), NO_OPERATORS).unwrap();
    fs::write(dir.path().join("v/2/model.py"), "pass").unwrap();
    fs::write(dir.path().join("s.onnx"), NO_OPERATORS).unwrap();
    let yaml = "run_dir: /run/x\ngpus: [{device: emulated}]\nmodels:\n\
        - {path: v, versions: [1, 3], slo: 20ms, threads: 2, gpu: auto, rollout: {mirror: 7%}}\n\
        - {path: s.onnx, slo: 20ms, isolation: shared}\n\
        - {name: e, engine: emulated, slo: 20ms, tensors: [{input: x, output: y, datatype: FP32, shape: [4]}]}\n";
    let file = dir.path().join("config.yaml");
    fs::write(&file, yaml).unwrap();
    let config = crate::load(&file, &|_| None, false).unwrap();
    (dir, config)
}

#[test]
fn any_version_can_be_read_with_the_keys_of_the_item() {
    let (dir, config) = config();
    let path = dir.path().join("v/2");
    let model = version_of(&config, "v", 2, &path).unwrap();
    assert_eq!((&model.name[..], model.version.number, model.gpu), ("v:2", 2, 0));
    assert_eq!(model.version.folder, config.models[0].version.folder);
    assert_eq!((model.broken, model.rollout), (None, config.models[0].rollout.clone()));
    assert!(matches!(&model.engine, EngineConfig::Python { path: p, threads: 2, .. } if *p == path));

    let other = dir.path().join("new.onnx");
    let missing = version_of(&config, "s", 2, &other).unwrap();
    assert_eq!((&missing.name[..], &missing.version.folder), ("s:2", &None));
    assert!(missing.broken.unwrap().contains("new.onnx: No such file"));
    fs::write(&other, NO_OPERATORS).unwrap();
    let model = version_of(&config, "s", 2, &other).unwrap();
    assert_eq!((model.broken.as_ref(), model.engine.path()), (None, Some(&*other)));
    assert_eq!(version_of(&config, "s", 1, &dir.path().join("s.onnx")).as_ref().unwrap().name, "s");

    assert_eq!(version_of(&config, "v:1", 1, &path), None);
    assert_eq!(version_of(&config, "nothing", 1, &path), None);
}

#[test]
fn a_version_that_the_items_keys_do_not_fit_is_broken() {
    let (dir, config) = config();
    let broken = |name, path: &str| version_of(&config, name, 2, &dir.path().join(path)).unwrap().broken;
    let python = broken("s", "v/2").unwrap();
    assert!(python.contains("isolation: a Python model needs a process of its own"), "{python}");
    let emulated = broken("e", "s.onnx").unwrap();
    assert!(emulated.contains("the emulated engine has no versions"), "{emulated}");
    let folder = broken("v", "v").unwrap();
    assert!(folder.contains("v/model.onnx: No such file"), "{folder}");
    let text = broken("v", "config.yaml").unwrap();
    assert!(text.contains("config.yaml: "), "{text}");
}

#[test]
fn a_client_changes_the_version_that_it_loads() {
    let (dir, mut config) = config();
    let written = config.models[0].clone();
    assert_eq!(written.name, "v:1");
    let changed = apply_client_changes(&config, &written, r#"{"slo": "5ms"}"#).unwrap();
    assert_eq!(
        (&changed.name, &changed.version, &changed.engine),
        (&written.name, &written.version, &written.engine)
    );
    assert_eq!((changed.slo.latency.as_millis(), changed.share), (5, written.share));

    fs::remove_file(dir.path().join("v/1/model.onnx")).unwrap();
    let broken = apply_client_changes(&config, &written, "{}").unwrap().broken.unwrap();
    assert!(broken.contains("v/1/model.onnx: No such file"), "{broken}");
    assert_eq!(apply_client_changes(&config, &config.models[1], "{}").as_ref(), Ok(&config.models[1]));

    // A released version that the configuration's file does not list stays this version, too.
    let released = version_of(&config, "s", 4, &dir.path().join("v/3/model.onnx")).unwrap();
    config.models.push(released.clone());
    assert_eq!(apply_client_changes(&config, &released, "{}"), Ok(released));
}

#[test]
fn a_broken_file_of_a_single_version_is_named_as_it_is_written() {
    let (dir, config) = config();
    let single = config.models.iter().find(|model| model.name == "s").unwrap();
    fs::remove_file(dir.path().join("s.onnx")).unwrap();
    let again = read_again(&config, single).unwrap();
    assert_eq!((&again.version, &again.engine), (&single.version, &single.engine));
    assert!(again.broken.unwrap().contains("s.onnx: No such file"));
}
