use std::fs;
use std::path::Path;

use super::*;

/// A folder with a configuration, and with versions of the model `m`.
struct Files(tempfile::TempDir);

impl Files {
    fn new(versions: &[&str]) -> Self {
        let files = Self(tempfile::tempdir().unwrap());
        for version in versions {
            files.add(version);
        }
        files
    }

    fn add(&self, version: &str) {
        fs::create_dir_all(self.path(version)).unwrap();
        fs::write(self.path(version).join("model.py"), "#").unwrap();
    }

    fn path(&self, version: &str) -> PathBuf {
        self.0.path().join(version)
    }

    /// Returns the configuration with these keys of the model.
    fn config(&self, keys: &str) -> Config {
        let file = self.path("config.yaml");
        let head = "run_dir: /tmp/x\ngpus: [{device: emulated, sms: 132}]\nmodels:\n";
        fs::write(&file, format!("{head}  - {{name: m, engine: python, slo: 20ms, {keys}}}\n")).unwrap();
        shadowslice_config::load(Path::new(&file), &|_| None, false).unwrap()
    }

    /// Returns the model as if this version was released.
    fn running(&self, number: u32, path: &str, written: &str) -> RunningModel {
        let in_folder = path.starts_with("versions");
        let name = if in_folder || number > 1 { format!("m:{number}") } else { "m".to_owned() };
        let version = ModelVersion { model: "m".to_owned(), number, folder: None };
        RunningModel {
            name: "m".to_owned(),
            written: self.path(written),
            has_release: path != written && !in_folder,
            released: RunningVersion { name, version, path: self.path(path), at_small_share: None },
            others: Vec::new(),
            numbers: vec![number],
            newest: number,
            is_failing: false,
        }
    }
}

/// Returns the instances that should run with their paths, and the versions to roll out.
fn merged(files: &Files, keys: &str, running: RunningModel) -> (Vec<(String, PathBuf)>, Vec<PathBuf>) {
    let merged = merge(files.config(keys), &[running]);
    let path = |model: &ModelConfig| model.engine.path().unwrap().to_owned();
    let models = merged.config.models.iter().map(|model| (model.name.clone(), path(model)));
    (models.collect(), merged.rollouts.iter().map(|rollout| path(&rollout.candidate)).collect())
}

#[test]
fn a_changed_path_is_rolled_out_if_the_model_has_a_rollout_or_versions() {
    let files = Files::new(&["a", "b", "c"]);
    let (a, b, c) = (files.path("a"), files.path("b"), files.path("c"));
    let first = || files.running(1, "a", "a");
    let m = |path: &PathBuf| vec![("m".to_owned(), path.clone())];
    assert_eq!(merged(&files, "path: b", first()), (m(&b), vec![]), "new workers take over");
    assert_eq!(merged(&files, "path: b, rollout: {}", first()), (m(&a), vec![b.clone()]));
    let second = || files.running(2, "b", "a");
    let m2 = vec![("m:2".to_owned(), b.clone())];
    for keys in ["path: a", "path: b", "path: a, rollout: {}"] {
        assert_eq!(merged(&files, keys, second()), (m2.clone(), vec![]), "{keys}");
    }
    assert_eq!(merged(&files, "path: c", second()), (m2, vec![c.clone()]));
    let broken = RunningModel { is_failing: true, ..second() };
    assert_eq!(merged(&files, "path: c, rollout: {}", broken), (m(&c), vec![]), "nothing is lost");
}

#[test]
fn a_rollout_in_progress_keeps_both_versions_and_the_small_share() {
    let files = Files::new(&["a", "b"]);
    let small = files.config("path: b, share: {initial: 10%, max: 10%}").models.remove(0);
    let candidate = RunningVersion {
        at_small_share: Some(Box::new(small.clone())),
        ..files.running(2, "b", "a").released
    };
    let running = RunningModel { others: vec![candidate], ..files.running(1, "a", "a") };
    let config = merge(files.config("path: a, rollout: {}, standby: always"), &[running]).config;
    let shares: Vec<_> =
        config.models.iter().map(|model| (model.name.as_str(), model.share.max.get())).collect();
    assert_eq!(shares, [("m", 100), ("m:2", 10)]);
    assert!(config.models.iter().all(|model| model.standby), "other keys change");
}

#[test]
fn newer_and_dropped_versions_of_a_folder_are_rolled_out() {
    let files = Files::new(&["versions/1", "versions/2"]);
    let [one, two] = ["versions/1", "versions/2"].map(|version| files.path(version));
    let (m1, m2) = (("m:1".to_owned(), one.clone()), ("m:2".to_owned(), two.clone()));
    let running = |number: u32| files.running(number, &format!("versions/{number}"), "versions");
    let latest = "path: versions";
    assert_eq!(merged(&files, latest, running(1)), (vec![m1.clone()], vec![two.clone()]));
    assert_eq!(merged(&files, latest, running(2)), (vec![m2.clone()], vec![]));
    let rolled_back = RunningModel { newest: 2, ..running(1) };
    assert_eq!(merged(&files, latest, rolled_back), (vec![m1.clone()], vec![]), "it does not return");
    let all = "path: versions, versions: all";
    assert_eq!(merged(&files, all, running(2)), (vec![m1.clone(), m2.clone()], vec![]));
    assert_eq!(merged(&files, all, running(1)), (vec![m1.clone()], vec![two]));
    let listed = "path: versions, versions: [1]";
    let dropped = (vec![m2.clone()], vec![one.clone()]);
    assert_eq!(merged(&files, listed, running(2)), dropped, "the released one is dropped");
    let both = RunningModel { numbers: vec![1, 2], ..running(2) };
    assert_eq!(merged(&files, listed, both), (vec![m1, m2], vec![one]), "version 1 keeps its workers");
}
