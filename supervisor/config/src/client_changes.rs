//! Applies the changes that a client sends with the protocol's `load` call to the configuration of a
//! model. The changes are JSON, and only some keys are allowed.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;

use super::faults::{ConfigFault, FaultLog};
use super::host::AnyHost;
use super::keys::{CONFIG, Kind};
use super::reader::Value;
use super::types::{Config, ModelConfig, ShareConfig};
use super::yaml::{self, YamlNode};
use super::{Context, EXAMPLE, bounds, document, render};

/// The keys that a client is allowed to set. None of these keys selects the interpreter or the
/// model's file.
const KEYS: [&str; 8] = ["share", "slo", "batch", "queue", "priority", "handover", "standby", "warmup"];

const MAX_BYTES: usize = 64 * 1024;

/// Returns a model's configuration with the changes in `json`.
///
/// Checks the model and its files together with the rest of `config`, the current configuration.
/// The result must stay within the bounds of `written`, the model in the operator's file. If a file
/// of the model is missing or invalid, the result is `Ok`, and its field `broken` has the reason.
///
/// # Errors
///
/// A text that lists the faults of the JSON, of its keys and values, or of its bounds.
pub fn apply_client_changes(
    config: &Config,
    written: &ModelConfig,
    json: &str,
) -> Result<ModelConfig, String> {
    if json.len() > MAX_BYTES {
        return Err(format!("the configuration has {} bytes; at most {MAX_BYTES} are allowed", json.len()));
    }
    let log = FaultLog::new(Path::new("config"));
    let changes = yaml::parse(json, "{\"share\": \"40%\"}", &log);
    // If a key occurs twice, the parser records a fault but still returns a document. The faults
    // are therefore checked too.
    let faults = log.into_sorted();
    let changes = changes.filter(|_| faults.is_empty()).ok_or_else(|| listed(faults))?;
    let mut whole = yaml::parse(&render(config), EXAMPLE, &FaultLog::new(Path::new("")))
        .ok_or("the current configuration cannot be parsed again; please report this bug")?;
    let place = config.models.iter().position(|model| model.name == written.name).ok_or("model not found")?;
    let models = Rc::make_mut(&mut whole).get_mut("models");
    if let Some(model) = models.and_then(|models| models.item_mut(place)) {
        change(model, &changes);
    }
    let log = FaultLog::new(Path::new("config"));
    check_keys(&Value::root(&changes, &Kind::Text, &log));
    // A rendered configuration has absolute paths, so the folder and the environment have no
    // effect.
    let context = Context {
        dir: Path::new(""),
        env: &|_| None,
        is_root: false,
        host: &AnyHost,
        file_faults: RefCell::default(),
        host_faults: RefCell::default(),
        notes: RefCell::default(),
    };
    let mut read = document(&Value::root(&whole, &CONFIG, &log), &context);
    let faults = log.into_sorted();
    if !faults.is_empty() {
        return Err(listed(faults));
    }
    let mut model = read.models.swap_remove(place);
    // A client cannot change the GPU. For `gpu: auto`, the reader returns 0, so the index of the
    // current GPU is restored here.
    model.gpu = config.models[place].gpu;
    if !names_initial(&changes) {
        // Without this assignment, a model without `share.initial` would get an equal part of the
        // share that the other models leave. This part may have changed since the model was loaded.
        let (old, share) = (config.models[place].share, model.share);
        let initial = old.initial.clamp(share.min, share.max);
        model.share = ShareConfig { initial, given: old.given, ..share };
    }
    let beyond = bounds::beyond(&config.models[place], &model, written);
    if !beyond.is_empty() {
        return Err(beyond.join("\n"));
    }
    Ok(model)
}

fn names_initial(changes: &YamlNode) -> bool {
    changes.get("share").is_some_and(|share| share.is_scalar() || share.get("initial").is_some())
}

fn check_keys(changes: &Value<'_>) {
    for (key, value) in changes.any_fields() {
        if !KEYS.contains(&key) {
            value.fault(format!("a client cannot set this key; use one of {}", KEYS.join(", ")));
        }
        if key == "warmup" {
            check_files(&value);
        }
    }
}

/// Records a fault for each file that the client names for the warm-up. The supervisor would read
/// the file even if the client does not have the permission to read it.
fn check_files(warmup: &Value<'_>) {
    const WHY: &str = "a client cannot name a file; give `values` or a `range`";
    if warmup.is_scalar() {
        return warmup.fault(WHY);
    }
    let inputs = warmup.is_map().then(|| warmup.any_fields());
    let files = inputs.into_iter().flatten().filter_map(|(_, input)| input.entry("file"));
    files.for_each(|file| file.fault(WHY));
}

/// Merges the client's changes into the model's configuration.
///
/// A scalar `share` is the initial share, and a scalar `slo` is the latency. If the changes set a
/// new `batch.max` without `sizes`, the old sizes are removed. If the changes set new values of an
/// input, the input's file is removed.
fn change(model: &mut YamlNode, changes: &YamlNode) {
    let mut changes = changes.clone();
    for (key, within) in [("share", "initial"), ("slo", "latency")] {
        if let Some(value) = changes.get_mut(key).filter(|value| value.is_scalar()) {
            value.wrap(within);
        }
    }
    let gives = |key| changes.get("batch").is_some_and(|batch| batch.get(key).is_some());
    if gives("max")
        && !gives("sizes")
        && let Some(batch) = model.get_mut("batch")
    {
        batch.remove("sizes");
    }
    leave_files(model, &changes);
    model.merge(&changes);
}

/// Removes the key `file` of each input for which the client gives values.
fn leave_files(model: &mut YamlNode, changes: &YamlNode) {
    let (Some(warmup), Some(given)) = (model.get_mut("warmup"), changes.get("warmup")) else { return };
    for name in given.keys() {
        if let Some(input) = warmup.get_mut(name) {
            input.remove("file");
        }
    }
}

/// Formats the faults without their positions, because the positions refer to a rendered text that
/// the client has not seen.
fn listed(faults: Vec<ConfigFault>) -> String {
    let line = |ConfigFault { path, message, .. }: &ConfigFault| {
        if path.is_empty() { message.clone() } else { format!("{path}: {message}") }
    };
    faults.iter().map(line).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use shadowslice_shared::units::Percent;

    use super::*;
    use crate::HandoverMode;

    const TENSORS: &str = "tensors: [{input: x, output: y, datatype: FP32, shape: [4]}]";

    fn config() -> (tempfile::TempDir, Config) {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("config.yaml");
        let yaml = format!(
            "run_dir: /tmp/x\ngpus: [{{device: emulated, sms: 132}}]\nmodels:\n\
             \x20 - {{name: a, engine: emulated, slo: 20ms, share: {{initial: 30%, min: 10%}}, {TENSORS}}}\n\
             \x20 - {{name: b, engine: emulated, slo: 30ms, share: {{min: 50%}}, {TENSORS}}}\n"
        );
        std::fs::write(&file, yaml).unwrap();
        let config = crate::load(&file, &|_| None, false).unwrap();
        (dir, config)
    }

    fn apply_client_changes(config: &Config, name: &str, json: &str) -> Result<ModelConfig, String> {
        let written = config.models.iter().find(|model| model.name == name).unwrap();
        super::apply_client_changes(config, written, json)
    }

    #[test]
    fn a_client_stays_within_what_the_operator_wrote() {
        let (_dir, mut config) = config();
        let keys = [
            r#"{"share": {"min": "5%"}}"#,
            r#"{"share": {"min": "20%"}}"#,
            r#"{"share": {"max": "90%"}}"#,
            r#"{"priority": 4}"#,
            r#"{"standby": "always"}"#,
            r#"{"batch": {"max": 33}}"#,
            r#"{"queue": {"max_requests": 1025}}"#,
            r#"{"queue": {"memory": "257Mi"}}"#,
            r#"{"queue": {"on_late": "serve"}}"#,
        ];
        let model = &mut config.models[0];
        (model.share.max, model.priority) = (Percent::new(80).unwrap(), 5);
        for json in keys {
            let refused = apply_client_changes(&config, "a", json).unwrap_err();
            assert!(refused.contains("a client may only set"), "{json}: {refused}");
        }
        assert!(
            apply_client_changes(&config, "a", r#"{"cpus": [0]}"#)
                .unwrap_err()
                .starts_with("cpus: a client cannot set this key")
        );
        let less = r#"{"share": {"initial": "80%", "max": "80%"}, "priority": 6, "batch": {"max": 32},
            "queue": {"max_requests": 7, "memory": "64Mi"}, "standby": "off"}"#;
        apply_client_changes(&config, "a", less).unwrap();
        // A client can undo restrictions that an earlier client command set, but only up to the
        // values that the operator wrote.
        let written = config.models[0].clone();
        config.models[0].priority = 9;
        let again = |json| super::apply_client_changes(&config, &written, json);
        assert_eq!(again(r#"{"priority": 5}"#).unwrap().priority, 5);
        assert!(again(r#"{"priority": 4}"#).unwrap_err().starts_with("priority: "));
        let both = again(r#"{"priority": 1, "standby": "always"}"#).unwrap_err();
        assert_eq!(both.lines().count(), 2, "{both}");
    }

    #[test]
    fn missing_keys_stay_unchanged() {
        let (_dir, config) = config();
        assert_eq!(apply_client_changes(&config, "a", "{}").as_ref(), Ok(&config.models[0]));
        let changed = apply_client_changes(
            &config,
            "a",
            r#"{"share": "40%", "batch": {"max": 8}, "handover": "never", "slo": "5ms"}"#,
        );
        let changed = changed.unwrap();
        assert_eq!((changed.share.initial.get(), changed.share.min.get()), (40, 10));
        assert_eq!((changed.batch.max, changed.handover), (Some(8), HandoverMode::Never));
        assert_eq!(changed.slo.latency, std::time::Duration::from_millis(5));
        assert_eq!(changed.queue, config.models[0].queue);
    }

    #[test]
    fn a_missing_share_stays_unchanged_beside_other_models() {
        let (_dir, mut config) = config();
        let equal = config.models[1].share;
        assert!(!equal.given);
        config.models[0].share.initial = Percent::new(20).unwrap();
        config.models[0].share.given = true;
        let share = |json| apply_client_changes(&config, "b", json).unwrap().share;
        assert_eq!(share("{}"), equal);
        assert_eq!(share(r#"{"slo": "5ms"}"#), equal);
        assert_eq!(share(r#"{"share": {"max": "60%"}}"#).initial.get(), 60);
        assert_eq!(
            (share(r#"{"share": "55%"}"#).initial.get(), share(r#"{"share": "55%"}"#).given),
            (55, true)
        );
    }

    #[test]
    fn a_latency_alone_keeps_the_percentile() {
        let (_dir, mut config) = config();
        config.models[0].slo.percentile = 99.9;
        let slo = |json| apply_client_changes(&config, "a", json).unwrap().slo;
        let latency = std::time::Duration::from_millis(5);
        assert_eq!(slo(r#"{"slo": "5ms"}"#), crate::SloTarget { latency, percentile: 99.9 });
        assert_eq!(
            slo(r#"{"slo": {"percentile": 90}}"#),
            crate::SloTarget { percentile: 90.0, ..config.models[0].slo }
        );
    }

    #[test]
    fn values_of_a_client_replace_those_of_a_file() {
        let (dir, config) = config();
        let written = std::fs::read_to_string(dir.path().join("config.yaml")).unwrap();
        let file = dir.path().join("with-file.yaml");
        std::fs::write(dir.path().join("x.json"), "[[1, 2, 3, 4]]").unwrap();
        for warmup in ["x.json", "{x: {file: x.json}}"] {
            std::fs::write(&file, written.replace("name: a,", &format!("name: a, warmup: {warmup},")))
                .unwrap();
            let config = crate::load(&file, &|_| None, false).unwrap();
            let warmup = |json| apply_client_changes(&config, "a", json).unwrap().warmup;
            assert_eq!(warmup("{}"), config.models[0].warmup);
            let values = warmup(r#"{"warmup": {"x": {"range": [0, 1]}}}"#);
            assert_eq!(values.files().count(), 0);
            assert!(matches!(&values.inputs["x"].values, Some(crate::WarmupValues::Written(_))));
        }
        assert!(config.models[0].warmup.inputs.is_empty());
    }

    #[test]
    fn every_fault_is_reported_and_a_client_cannot_choose_what_runs() {
        let (_dir, config) = config();
        for (json, words) in [
            (r#"{"path": "/etc/passwd"}"#, "path: a client cannot set"),
            (r#"{"name": "c"}"#, "name: a client cannot set"),
            (r#"{"share": "400%"}"#, "share.initial"),
            (r#"{"share": {"min": "60%"}}"#, "add up to 110%"),
            (r#"{"batch": {"mux": 8}}"#, "mux"),
            (r#"{"slo": "1ms", "slo": "2ms"}"#, "slo"),
            (r#"{"warmup": "/etc/x.json"}"#, "warmup: a client cannot name a file"),
            (r#"{"warmup": {"x": {"file": "/etc/x.npy"}}}"#, "warmup.x.file: a client cannot name a file"),
            (r#"{"warmup": {"x": [4]}, "batch": {"max": 2}, "tensors": []}"#, "tensors"),
            ("[]", "map"),
            ("{", "config"),
            ("", ""),
        ] {
            let refused = apply_client_changes(&config, "a", json).unwrap_err();
            assert!(refused.contains(words) || words == "config", "{json}: {refused}");
        }
        let both = apply_client_changes(&config, "a", r#"{"slo": "x", "priority": 0}"#).unwrap_err();
        assert!(both.contains("slo") && both.contains("priority"), "{both}");
    }
}
