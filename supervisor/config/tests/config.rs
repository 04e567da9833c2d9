//! Tests configurations in the form that operators write, and the error messages that operators
//! read.
//!
//! Each `config/NAME.yaml` has its expected messages in `config/NAME.expected`. `UPDATE_GOLDEN=1`
//! overwrites these files. Read the difference before you commit it.

#![allow(clippy::unwrap_used, reason = "this crate contains only tests")]

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use shadowslice_config as config;
use shadowslice_config::{Config, ConfigError, ConfigFault, FaultList};

/// The contents of a model's file that passes the check. The model has no operators.
const NO_OPERATORS: &[u8] = b"\x08\x09\x3a\x07\x12\x05graph";

/// Looks up a variable in an environment that has only the run directory.
fn environment(name: &str) -> Option<OsString> {
    (name == "RUNTIME_DIRECTORY").then(|| OsString::from("/run/test"))
}

fn load(path: &Path) -> Result<Config, ConfigError> {
    config::load(path, &environment, false)
}

/// Writes a configuration to a new folder and loads it. Removes the folder's path from messages.
fn load_bytes(bytes: &[u8]) -> Result<Config, String> {
    let folder = tempfile::tempdir().expect("the temporary folder is writable");
    let path = folder.path().join("x.yaml");
    fs::write(&path, bytes).expect("the folder is new and writable");
    load(&path).map_err(|error| error.to_string().replace(&format!("{}/", folder.path().display()), ""))
}

fn load_text(text: &str) -> Result<Config, String> {
    load_bytes(text.as_bytes())
}

/// Returns the messages about a file in the form that operators read.
fn messages(path: &Path) -> String {
    match load(path) {
        Ok(config) => {
            let notes: String = config.notes.iter().map(|note| format!("note: {note}\n")).collect();
            let faults = FaultList(&config.file_faults).to_string();
            let verdict = if faults.is_empty() { "fine" } else { faults.as_str() };
            format!("{notes}{verdict}\n")
        }
        Err(error) => format!("{error}\n"),
    }
}

fn yaml_files(folder: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder)
        .expect("the folder is in the tree")
        .map(|entry| entry.expect("the folder can be read").path());
    let mut files: Vec<_> = entries.filter(|path| path.extension().is_some_and(|e| e == "yaml")).collect();
    files.sort();
    files
}

#[test]
fn messages_are_as_expected() {
    let update = std::env::var_os("UPDATE_GOLDEN").is_some();
    let files = yaml_files("tests/config");
    assert!(files.len() > 20, "the golden files exist");
    let mut differing = Vec::new();
    for file in files {
        let expected = file.with_extension("expected");
        let got = messages(&file);
        if update {
            fs::write(&expected, &got).unwrap();
        } else if fs::read_to_string(&expected).unwrap_or_default() != got {
            differing.push(format!("{}:\n{got}", expected.display()));
        }
    }
    assert!(differing.is_empty(), "UPDATE_GOLDEN=1 writes these:\n{}", differing.join("\n"));
}

const FULL: &str = include_str!("config/everything.yaml");

#[test]
fn a_printed_configuration_loads_as_the_same() {
    for file in [
        "tests/config/everything.yaml",
        "tests/config/shortest.yaml",
        "tests/config/warmup-of-files.yaml",
        "tests/config/warmup-files.yaml",
        "tests/config/versions.yaml",
        "tests/config/versions-missing.yaml",
        "../../configs/two-emulated.yaml",
    ] {
        let loaded = load(Path::new(file)).unwrap();
        let printed = config::render(&loaded);
        let again = load_text(&printed).unwrap();
        let but_places = |config| Config { file_faults: Vec::new(), notes: Vec::new(), ..config };
        let broken = |config: &Config| config.models.iter().map(|m| m.broken.is_some()).collect::<Vec<_>>();
        assert_eq!(broken(&again), broken(&loaded), "{file}");
        let mut again = but_places(again);
        for (again, loaded) in again.models.iter_mut().zip(&loaded.models) {
            // The fault's text contains the path of the file, and the paths differ.
            again.broken.clone_from(&loaded.broken);
        }
        assert_eq!(again, but_places(loaded), "{file}, printed as\n{printed}");
        assert_eq!(config::render(&again), printed, "{file}");
    }
}

#[test]
fn every_configuration_in_the_tree_is_valid() {
    let files = yaml_files("../../configs");
    assert!(files.len() >= 2);
    for file in files {
        let config = load(&file).unwrap_or_else(|error| panic!("{error}"));
        // The models' files are not in the repository, because users build them.
        let faults: Vec<_> =
            config.file_faults.iter().filter(|fault| !fault.path.ends_with("].path")).collect();
        assert!(faults.is_empty(), "{faults:?}");
        // Two kinds of notes are expected. First, the policy in the file ignores the priorities,
        // because they are for simulations of other policies. Second, the profile of BERT was
        // measured with other shapes.
        let measured = |note: &ConfigFault| note.file.ends_with("bert-base.yaml");
        let meant = |note: &&ConfigFault| !note.path.ends_with("].priority") && !measured(note);
        let notes: Vec<_> = config.notes.iter().filter(meant).collect();
        assert!(notes.is_empty(), "{notes:?}");
    }
}

#[test]
fn every_profile_in_the_tree_is_valid() {
    let profiles = yaml_files("../../configs/profiles");
    assert!(profiles.len() >= 4);
    for profile in profiles {
        let profile = std::path::absolute(profile).unwrap();
        let config = load_text(&format!(
            "models: [{{name: m, engine: emulated, tensors: [{{input: x, output: y, datatype: FP32, shape: [1]}}], \
             slo: 20ms, profile: {}}}]",
            profile.display()
        ));
        assert_eq!(config.unwrap().file_faults, [], "{}", profile.display());
    }
}

#[test]
fn models_without_a_share_divide_what_the_others_leave() {
    let initial = |gpus: &str, shares: &[&str]| -> Vec<u32> {
        let model = |(index, share): (usize, &&str)| {
            format!("  - {{name: m{index}, path: m.onnx, slo: 20ms, share: {{{share}}}}}\n")
        };
        let models: String = shares.iter().enumerate().map(model).collect();
        let config = load_text(&format!("gpus: [{gpus}]\nmodels:\n{models}")).unwrap();
        config.models.iter().map(|model| model.share.initial.get()).collect()
    };
    assert_eq!(initial("{device: 0}", &[""]), [100]);
    assert_eq!(initial("{device: 0}", &["initial: 40%", "", ""]), [40, 30, 30]);
    assert_eq!(initial("{device: 0}", &["", "max: 10%", "min: 50%"]), [33, 10, 50], "within min and max");
    assert_eq!(initial("{device: 0}", &["initial: 100%", ""]), [100, 2], "at least min: 2 SMs of 132");
    assert_eq!(initial("{device: emulated, sms: 20}", &["initial: 100%", ""]), [100, 10], "2 SMs of 20");
}

#[test]
fn requests_may_be_larger_than_the_default_slab() {
    let text = "limits: {request_bytes: 1Gi}\nmodels: [{path: m.onnx, slo: 20ms}]";
    assert_eq!(load_text(text).unwrap().models[0].queue.memory, 1 << 30);
}

#[test]
fn the_examples_in_the_reference_are_valid() {
    let reference = fs::read_to_string("../../docs/configuration.md").unwrap();
    let blocks: Vec<_> =
        reference.split("```yaml\n").skip(1).map(|rest| rest.split("```").next().unwrap()).collect();
    let [shortest, defaults, mapping, emulated, profile] = blocks[..] else {
        panic!("{} blocks", blocks.len())
    };

    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("digits.onnx"), NO_OPERATORS).unwrap();
    fs::write(folder.path().join("p.yaml"), profile).unwrap();
    let load = |text: &str| {
        let path = folder.path().join("x.yaml");
        fs::write(&path, text).unwrap();
        config::load(&path, &|_| None, true).unwrap()
    };
    assert_eq!(load(shortest), load(defaults));
    let with_profile = load(&format!("{emulated}    profile: p.yaml\n"));
    assert_eq!(with_profile.file_faults, []);
    assert!(with_profile.models[0].profile.is_some());
    let mapped = load(&format!("{emulated}{mapping}")).models.remove(0).openai.unwrap();
    assert!(mapped.embeddings.is_some() && mapped.completions.is_some());
}

#[test]
fn a_large_file_is_refused_by_its_size() {
    let comment = "# a very long comment\n".repeat(500_000);
    let fault = "x.yaml:1:1: the file is larger than 1 MiB; check its path";
    assert_eq!(load_text(&comment), Err(fault.to_owned()));
}

#[test]
fn bytes_that_are_not_text_are_refused_with_their_position() {
    let refused = |bytes: &[u8]| load_bytes(bytes).unwrap_err();
    let utf8 = "x.yaml:2:4: this byte is not valid UTF-8; save the file as UTF-8 text";
    assert_eq!(refused(b"models:\n - \xff\n"), utf8);
    let control = "x.yaml:1:8: the text has a control character here; remove it";
    assert_eq!(refused(b"models:\0 []"), control);
}

#[test]
fn byte_order_marks_and_crlf_are_accepted() {
    let plain = "models:\n  - path: m.onnx\n    slo: 20ms\n";
    let crlf = format!("\u{feff}{}", plain.replace('\n', "\r\n"));
    let names = |text: &str| load_text(text).map(|config| config.models[0].slo);
    assert_eq!(names(&crlf), names(plain));
    assert!(load_text(&crlf.replace("20ms", "20")).unwrap_err().starts_with("x.yaml:3:10: models[0].slo: "));
}

#[test]
fn at_most_fifty_faults_are_shown() {
    let keys: String = (0..60).map(|index| format!("wrong{index}: 1\n")).collect();
    let shown = load_text(&format!("{keys}models: [{{path: m.onnx, slo: 20ms}}]\n")).unwrap_err();
    let lines: Vec<_> = shown.lines().filter(|line| line.starts_with("x.yaml:")).collect();
    assert_eq!(lines.len(), 50);
    assert!(shown.ends_with("\nand 11 more"), "60 keys and the missing file: {shown}");
}

#[test]
fn the_run_directory_has_a_default_for_each_kind_of_user() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.yaml");
    fs::write(&path, "models: [{path: m.onnx, slo: 20ms}]").unwrap();
    let run_dir = |variables: &[(&str, &str)], is_root| {
        let env = |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, v)| OsString::from(v));
        config::load(&path, &env, is_root).map(|config| config.run_dir).map_err(|error| error.to_string())
    };
    let given = |path: &str| Ok(PathBuf::from(path));
    assert_eq!(run_dir(&[("RUNTIME_DIRECTORY", "/run/a:/run/b")], true), given("/run/a"));
    assert_eq!(run_dir(&[("XDG_RUNTIME_DIR", "/run/user/1")], true), given("/run/shadowslice"));
    assert_eq!(run_dir(&[("XDG_RUNTIME_DIR", "/run/user/1")], false), given("/run/user/1/shadowslice"));
    let refused = run_dir(&[("XDG_RUNTIME_DIR", "")], false).unwrap_err();
    assert!(
        refused.contains("run_dir: missing, and neither RUNTIME_DIRECTORY nor XDG_RUNTIME_DIR is set"),
        "{refused}"
    );
}

#[test]
fn files_beside_the_configuration_are_found_from_anywhere() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("m.onnx"), NO_OPERATORS).unwrap();
    fs::create_dir(folder.path().join("folder.onnx")).unwrap();
    fs::write(folder.path().join("empty.onnx"), "").unwrap();
    let path = folder.path().join("x.yaml");
    let models = ["m", "folder", "empty"].map(|name| format!("{{path: {name}.onnx, slo: 20ms}}")).join(", ");
    fs::write(&path, format!("models: [{models}]")).unwrap();
    let config = load(&path).unwrap();
    let broken: Vec<_> = config.models.iter().map(|model| model.broken.clone().unwrap_or_default()).collect();
    assert_eq!(broken[0], "");
    assert!(broken[1].contains("folder.onnx: this is a directory"), "{}", broken[1]);
    assert!(broken[2].contains("empty.onnx: the file is empty"), "{}", broken[2]);
}

#[test]
fn random_changes_do_not_crash_the_loader() {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut random = move |below: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    };
    const PIECES: [&str; 16] =
        ["{", "}", "[", "]", ":", ": ", "\n", "  ", "- ", "\"", "&a ", "*a", "!t ", "?", "|\n", "é"];
    for _ in 0..500 {
        let mut text: Vec<char> = FULL.chars().collect();
        for _ in 0..=random(3) {
            let (from, length) = (random(text.len()), random(8));
            let to = (from + length).min(text.len());
            text.splice(from..to, PIECES[random(PIECES.len())].chars());
        }
        let text: String = text.into_iter().collect();
        if let Err(faults) = load_text(&text) {
            assert!(
                faults.lines().all(|line| line.contains(".yaml:") || line.starts_with("and ")),
                "{faults}\nin\n{text}"
            );
        }
    }
}

/// Returns an encoded protobuf field of bytes.
fn field(number: u8, value: &[u8]) -> Vec<u8> {
    let length = u8::try_from(value.len()).expect("it is short");
    [&[number << 3 | 2, length], value].concat()
}

/// Returns a model's file with the inputs `ids` (INT64, [-1, 3]), `text` (BYTES, [1]) and `scale`
/// (FP32, with a default).
fn model_with_inputs() -> Vec<u8> {
    let input = |name: &str, element: u8, axes: &[&[u8]]| {
        let axes: Vec<u8> = axes.iter().flat_map(|axis| field(1, axis)).collect();
        let tensor = [vec![8, element], field(2, &axes)].concat();
        field(11, &[field(1, name.as_bytes()), field(2, &field(1, &tensor))].concat())
    };
    let inputs = [
        input("ids", 7, &[&field(2, b"n"), &[8, 3]]),
        input("text", 8, &[&[8, 1]]),
        input("scale", 1, &[&[8, 1]]),
    ];
    field(7, &[inputs.concat(), field(5, &field(8, b"scale"))].concat())
}

/// Returns the faults of a model's warm-up, one per line.
fn warm_up_faults(folder: &Path, warmup: &str) -> String {
    let path = folder.join("x.yaml");
    let text = format!("run_dir: /run/x\nmodels: [{{path: m.onnx, slo: 1s, warmup: {warmup}}}]\n");
    fs::write(&path, text).unwrap();
    let config = load(&path).unwrap();
    assert_eq!(config.file_faults.is_empty(), config.models[0].broken.is_none());
    let faults = config.file_faults.iter().map(|fault| format!("{}: {}\n", fault.path, fault.message));
    faults.collect::<String>().replace(&format!("{}/", folder.display()), "")
}

/// Creates a folder with a model and with arrays for its inputs.
fn folder_of_model() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("m.onnx"), model_with_inputs()).unwrap();
    fs::write(folder.path().join("ids.json"), "[[1, 2, 3], [4, 5, 6]]").unwrap();
    fs::write(folder.path().join("short.json"), "[[1, 2]]").unwrap();
    let all = r#"{"inputs": [{"name": "ids", "shape": [1, 2], "datatype": "INT64", "data": [1, 2]}]}"#;
    fs::write(folder.path().join("all.json"), all).unwrap();
    folder
}

#[test]
fn warm_up_inputs_may_match_the_models_file() {
    let folder = folder_of_model();
    for fine in [
        "{ids: [3]}",
        "{ids: [8, 3]}",
        "{ids: 7, text: Wien}",
        "{ids: {shape: [3], range: [0, 9]}, text: {values: [a, b]}}",
        "{ids: {file: ids.json}}",
        "ids.json",
    ] {
        let found = warm_up_faults(folder.path(), fine);
        // An array without a name is for a model's only input, but this model has two inputs.
        let of_two = fine == "ids.json" && found.contains("has one array without a name; name its input");
        assert!(found.is_empty() || of_two, "{fine}: {found}");
    }
}

#[test]
fn warm_up_inputs_that_do_not_match_the_models_file_are_faults() {
    let folder = folder_of_model();
    let ids = "models[0].warmup.ids: m.onnx";
    let shape = "[-1, 3] (-1: any size; omit the first axis if it is the batch)";
    for (wrong, why) in [
        ("{idss: [3]}", "models[0].warmup.idss: unknown input; the model has ids, text".to_owned()),
        (
            "{scale: 1.0}",
            "models[0].warmup.scale: m.onnx has a default for this input, which the warm-up uses; \
             remove the key"
                .to_owned(),
        ),
        ("{ids: [4]}", format!("{ids} has this input with shape {shape}, not [4]")),
        ("{ids: [8, 8, 3]}", format!("{ids} has this input with shape {shape}, not [8, 8, 3]")),
        (
            "{ids: 0.5}",
            format!(
                "{ids} cannot have these values: the input is INT64, but `values` has a fraction; use numbers of \
                 that type"
            ),
        ),
        (
            "{text: {range: [0, 1]}}",
            "models[0].warmup.text: m.onnx cannot have these values: the input has texts, which have no range; \
             use `values`"
                .to_owned(),
        ),
        (
            "{ids: {file: short.json}}",
            format!(
                "{ids} cannot have the array in short.json: the input's shape is [-1, 3] (-1: any size, the \
                 first axis is the batch), but the array's shape is [1, 2]; reshape the array"
            ),
        ),
        (
            "all.json",
            "models[0].warmup: `ids`: m.onnx cannot have the array in all.json: the input's shape is [-1, 3] \
             (-1: any size, the first axis is the batch), but the array's shape is [1, 2]; reshape the array"
                .to_owned(),
        ),
    ] {
        assert_eq!(warm_up_faults(folder.path(), wrong), format!("{why}\n"), "{wrong}");
    }
}

#[test]
fn check_reports_faults_and_returns_the_exit_code() {
    let folder = tempfile::tempdir().unwrap();
    let refusal = |path: &Path| path.ends_with("refused").then(|| "this folder is refused".to_owned());
    let checks = config::check::CheckHooks { run_dir: &refusal, model: &|_| None, advice: &|_| Vec::new() };
    let check = |text: &str, print| {
        let path = folder.path().join("x.yaml");
        fs::write(&path, text).unwrap();
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let status = config::check::run(&path, print, checks, &mut out, &mut err).unwrap();
        let text =
            |bytes| String::from_utf8(bytes).unwrap().replace(&format!("{}/", folder.path().display()), "");
        (status, text(out), text(err))
    };
    let fine = "run_dir: /run/x\nmodels: [{path: m.onnx, slo: 20ms}]\n";
    let (status, out, err) = check(fine, false);
    assert_eq!((status, out.as_str()), (78, ""));
    assert!(err.starts_with("x.yaml:2:17: models[0].path: cannot use m.onnx: No such file"), "{err}");

    fs::write(folder.path().join("m.onnx"), NO_OPERATORS).unwrap();
    let (status, out, err) = check(fine, false);
    assert_eq!((status, out.as_str(), err.as_str()), (0, "x.yaml: 1 model on 1 GPU: valid\n", ""));
    let (status, out, err) = check(fine, true);
    assert_eq!((status, err.as_str()), (0, ""));
    assert!(out.starts_with("run_dir: /run/x\n"), "{out}");

    for (number, versions) in [("1", "1 model"), ("7", "1 model with 2 versions")] {
        let version = folder.path().join("v").join(number);
        fs::create_dir_all(&version).unwrap();
        fs::write(version.join("model.onnx"), NO_OPERATORS).unwrap();
        let (_, out, _) = check("run_dir: /run/x\nmodels: [{path: v, versions: all, slo: 20ms}]", false);
        assert_eq!(out, format!("x.yaml: {versions} on 1 GPU: valid\n"));
    }

    let (status, out, err) = check(&fine.replace("/run/x", "/run/refused"), false);
    assert_eq!(
        (status, out.as_str(), err.as_str()),
        (78, "", "x.yaml:1:10: run_dir: on this host this folder is refused\n")
    );

    let (status, out, err) = check("models: {}\n", true);
    assert_eq!((status, out.as_str()), (78, ""));
    assert!(err.contains("x.yaml:1:9: models: must be a list"), "{err}");
    let nowhere = folder.path().join("nowhere.yaml");
    let mut err = Vec::new();
    let status = config::check::run(&nowhere, false, checks, &mut Vec::new(), &mut err).unwrap();
    assert_eq!(status, 78);
    assert!(String::from_utf8(err).unwrap().starts_with("error: cannot read "));
}

#[test]
fn the_defaults_of_fields_keep_their_kinds() {
    let fields = "{a: {input: a, default: 1.0}, b: {input: b, default: true}, c: {input: c, default: \"7\"}, d: {input: d, default: x y}}";
    let mapping = format!("{{completions: {{prompt: x, text: y, fields: {fields}}}}}");
    let text = format!("models: [{{path: m.onnx, slo: 20ms, openai: {mapping}}}]");
    let mut model = load_text(&text).unwrap().models.remove(0);
    let fields = std::sync::Arc::unwrap_or_clone(model.openai.take().unwrap()).completions.unwrap().fields;
    let defaults: Vec<_> = fields.values().map(|field| field.default.as_ref().unwrap().to_string()).collect();
    assert_eq!(defaults, ["1.0", "true", "\"7\"", "\"x y\""]);
}

#[test]
fn versions_and_rollouts_are_printed_with_their_defaults() {
    let config = load(Path::new("tests/config/versions.yaml")).unwrap();
    let names: Vec<_> = config.models.iter().map(|model| &model.name[..]).collect();
    let all = ["bert:10", "all:1", "all:3", "all:10", "listed:1", "listed:3", "single"];
    assert_eq!(names, all);
    assert!(config.models[0].rollout.is_none() && config.models[1].rollout.is_some());
    assert_eq!(config.models[1].rollout, Some(config::RolloutConfig::default()));
    let printed = config::render(&config).replace('"', "");
    let models = printed.split_once("models:").unwrap().1;
    let items: Vec<_> = models.split("\n  - ").skip(1).collect();
    let (latest, all, single) = (items[0], items[1], items[3]);
    assert!(latest.starts_with("name: bert\n    # engine: not set; from the suffix of path\n"), "{latest}");
    assert!(latest.contains("/versions/bert\n    versions: latest\n"), "{latest}");
    assert!(latest.contains("    # rollout: not set; as soon as it is ready\n"), "{latest}");
    let defaults = "    rollout:\n      mirror: 5%\n      canary: []\n      for: 5m\n      share: 10%\n      \
        compare: tolerance\n      # sticky: not set; each request is assigned on its own\n      keep: 10m\n      \
        replace: false\n      abort_if:\n        errors: 1%\n        differences: 1%\n        slowdown: 2.5\n";
    assert!(all.contains(defaults), "{all}");
    assert!(!single.contains("versions"), "{single}");
}
