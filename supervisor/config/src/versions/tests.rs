//! Tests of folders of versions.

use super::*;
use crate::types::{EngineConfig, ModelConfig};
use crate::{Config, load};

/// Creates a folder with these files, whose contents pass the check of a model's file.
fn folder(files: &[&str]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for file in files {
        let file = folder.path().join(file);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, b"\x08\x09\x3a\x07\x12\x05graph").unwrap();
    }
    folder
}

/// Loads a configuration with a model whose path is `folder`.
fn config(folder: &Path, more: &str) -> Config {
    let file = folder.join("config.yaml");
    let path = folder.display();
    let yaml = format!(
        "run_dir: /run/x\ngpus: [{{device: emulated}}]\n\
         models: [{{name: m, path: {path}, slo: 20ms{more}}}]"
    );
    fs::write(&file, yaml).unwrap();
    load(&file, &|_| None, false).unwrap_or_else(|error| panic!("{error}"))
}

fn names(models: &[ModelConfig]) -> Vec<&str> {
    models.iter().map(|model| &model.name[..]).collect()
}

#[test]
fn versions_are_folders_with_a_plain_number_and_a_model() {
    let folder = folder(&[
        "10/model.onnx",
        "2/model.py",
        "2/model.onnx",
        "3/model.txt",
        "0/model.onnx",
        "04/model.onnx",
        "+5/model.onnx",
        "4294967295/model.py",
        "4294967296/model.py",
        "latest/model.onnx",
        "6",
        "7/model.onnx/file",
    ]);
    let found = find_versions(folder.path());
    let found: Vec<_> = found
        .iter()
        .map(|version| (version.number, version.path.strip_prefix(folder.path()).unwrap().to_str().unwrap()))
        .collect();
    assert_eq!(found, [(2, "2"), (10, "10/model.onnx"), (u32::MAX, "4294967295")]);
    assert_eq!(find_versions(&folder.path().join("nowhere")), []);
    assert_eq!(find_versions(&folder.path().join("6")), []);
}

#[test]
fn each_served_version_is_an_instance() {
    let folder = folder(&["1/model.onnx", "3/model.onnx", "10/model.py"]);
    let latest = config(folder.path(), "").models;
    assert_eq!(names(&latest), ["m:10"]);
    let python = folder.path().join("10");
    assert!(matches!(&latest[0].engine, EngineConfig::Python { path, .. } if *path == python));
    assert_eq!(latest[0].engine.path(), Some(&*python));
    let versions = VersionFolder { path: folder.path().to_owned(), policy: VersionPolicy::Latest };
    let version = ModelVersion { model: "m".to_owned(), number: 10, folder: Some(versions) };
    assert_eq!((&latest[0].version, latest[0].served_name()), (&version, "m"));

    let all = config(folder.path(), ", versions: all").models;
    assert_eq!(names(&all), ["m:1", "m:3", "m:10"]);
    assert_eq!(all[1].engine.path(), Some(&*folder.path().join("3/model.onnx")));
    assert_eq!(all.iter().map(|model| model.share.initial.get()).collect::<Vec<_>>(), [33, 33, 33]);

    let listed = config(folder.path(), ", versions: [3, 1], share: {max: 30%}");
    assert_eq!((names(&listed.models), &listed.file_faults[..]), (vec!["m:1", "m:3"], &[][..]));
    assert!(listed.models.iter().all(|model| model.share.max.get() == 30));
    let policy = listed.models[0].version.folder.clone().unwrap().policy;
    assert_eq!(policy, VersionPolicy::Listed(vec![1, 3]));
}

#[test]
fn a_missing_version_leaves_the_others_usable() {
    let folder = folder(&["1/model.onnx"]);
    let models = config(folder.path(), ", versions: [1, 2]").models;
    assert_eq!((names(&models), &models[0].broken), (vec!["m:1", "m:2"], &None));
    let broken = models[1].broken.as_ref().unwrap();
    assert!(broken.contains("models[0].versions: version 2 not found in /"), "{broken}");
    assert!(!broken.contains("more"), "one reason suffices: {broken}");

    fs::remove_dir_all(folder.path().join("1")).unwrap();
    for more in ["", ", versions: all", ", versions: latest, engine: python"] {
        let models = config(folder.path(), more).models;
        assert_eq!(names(&models), ["m:1"], "{more}");
        let broken = models[0].broken.as_ref().unwrap();
        assert!(broken.contains("the folder contains no version; add for example 1/model.onnx"), "{broken}");
    }
    let faulty = folder.path().join("2");
    fs::create_dir(&faulty).unwrap();
    fs::write(faulty.join(ONNX_FILE), "").unwrap();
    let models = config(folder.path(), "").models;
    assert!(models[0].broken.as_ref().unwrap().contains("2/model.onnx: the file is empty"));
}

#[test]
fn a_python_models_folder_has_no_versions() {
    let folder = folder(&["model.py", "1/model.onnx"]);
    let models = config(folder.path(), ", engine: python").models;
    assert_eq!((names(&models), models[0].engine.path()), (vec!["m"], Some(folder.path())));
    assert_eq!(models[0].version.folder, None);
}

#[test]
fn versions_may_have_different_engines() {
    let folder = folder(&["1/model.onnx", "2/model.py"]);
    let models = config(folder.path(), ", versions: all, step_timeout: 1s").models;
    let timeouts: Vec<_> = models.iter().map(|model| model.engine.step_timeout()).collect();
    assert_eq!(timeouts, [None, Some(std::time::Duration::from_secs(1))]);
}

#[test]
fn a_given_engine_decides_between_two_files() {
    let folder = folder(&["1/model.onnx", "1/model.py"]);
    let path = |more: &str| config(folder.path(), more).models[0].engine.path().unwrap().to_owned();
    assert_eq!(path(""), folder.path().join("1"));
    assert_eq!(path(", engine: python"), folder.path().join("1"));
    assert_eq!(path(", engine: onnxruntime"), folder.path().join("1/model.onnx"));
}

#[test]
fn the_number_of_versions_is_limited() {
    let files: Vec<_> = (1..=MAX_VERSIONS + 2).map(|number| format!("{number}/model.onnx")).collect();
    let folder = folder(&files.iter().map(String::as_str).collect::<Vec<_>>());
    let config = config(folder.path(), ", versions: all");
    assert_eq!((config.models.len(), &config.models[0].name[..]), (MAX_VERSIONS, "m:3"));
    let notes: Vec<_> = config.notes.iter().map(ToString::to_string).collect();
    assert!(notes[0].ends_with("versions: the folder has 66 versions; only the newest 64 are served"));
}
