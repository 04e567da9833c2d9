//! Applies the changes that a client sends with the protocol's `load` call to the configuration of a
//! model. The changes are JSON, and can only have the keys `share` and `slo`.

use std::path::Path;

use super::faults::FaultLog;
use super::keys::CLIENT_CHANGES;
use super::models;
use super::read_again::read_again;
use super::reader::Value;
use super::types::{Config, ModelConfig, ShareConfig, SloTarget};
use super::units;
use super::yaml;

/// The largest configuration of a client, in bytes.
pub(super) const MAX_BYTES: usize = 4 * 1024;

/// Returns a model's configuration with the changes in `json`, and reads the model's files again.
///
/// `config` is the current configuration. The share must stay within the bounds of `written`, the
/// model in the operator's file. If a file of the model is missing or invalid, the result is `Ok`,
/// and its field `broken` has the reason.
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
    let current = config.models.iter().find(|model| model.name == written.name).ok_or("model not found")?;
    let (mut share, mut slo) = (current.share, current.slo);
    let log = FaultLog::new(Path::new("config"));
    if let Some(changes) = yaml::parse(json, "{\"share\": \"40%\"}", &log) {
        let changes = Value::root(&changes, &CLIENT_CHANGES, &log);
        for (key, value) in changes.any_fields() {
            match key {
                "share" => share = changed_share(&value, share, written.share),
                "slo" => slo = changed_slo(&value, slo, current),
                _ => value.fault("a client can set only `share` and `slo`; remove the key"),
            }
        }
    }
    log.into_text()?;
    let model = read_again(config, written).ok_or("model not found")?;
    // A client cannot change the GPU. For `gpu: auto`, the reader returns 0.
    Ok(ModelConfig { share, slo, gpu: current.gpu, ..model })
}

/// Returns the share with a client's changes. A scalar is the initial share.
fn changed_share(value: &Value<'_>, old: ShareConfig, written: ShareConfig) -> ShareConfig {
    let percent = |value: &Value<'_>| value.parsed(units::percent);
    let (initial, max) = if value.is_scalar() {
        (percent(value), None)
    } else {
        let keys = value.fields();
        if keys.optional("min", percent).is_some_and(|min| min != written.min) {
            keys.fault("min", format!("a client may only set the configured value, {}", written.min));
        }
        let max = keys.optional("max", percent);
        if max.is_some_and(|max| !(written.min..=written.max).contains(&max)) {
            let (min, max) = (written.min, written.max);
            keys.fault(
                "max",
                format!("a client may only set the configured value, {max}, or less, down to {min}"),
            );
        }
        (keys.optional("initial", percent), max)
    };
    let max = max.unwrap_or(old.max);
    if initial.is_some_and(|initial| !(old.min..=max).contains(&initial)) {
        value.fault(format!("the initial share must be from {} to {max}", old.min));
    }
    let share = initial.unwrap_or(old.initial).min(max).max(old.min);
    ShareConfig { initial: share, given: old.given || initial.is_some(), min: old.min, max }
}

/// Returns the SLO with a client's changes. A scalar is the latency.
fn changed_slo(value: &Value<'_>, old: SloTarget, model: &ModelConfig) -> SloTarget {
    let slo = match value.is_scalar() {
        true => SloTarget { latency: value.duration().unwrap_or(old.latency), ..old },
        false => models::slo_of(&value.fields(), old),
    };
    if model.batch.max_delay >= slo.latency {
        let delay = units::show_duration(model.batch.max_delay);
        value.fault(format!("the latency must be longer than batch.max_delay, {delay}"));
    }
    slo
}

#[cfg(test)]
mod tests {
    use shadowslice_shared::units::Percent;

    use super::*;

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
        config.models[0].share.max = Percent::new(80).unwrap();
        for (json, words) in [
            (r#"{"share": {"min": "5%"}}"#, "share.min: a client may only set the configured value, 10%"),
            (r#"{"share": {"min": "20%"}}"#, "share.min: a client may only set the configured value, 10%"),
            (r#"{"share": {"max": "90%"}}"#, "share.max: a client may only set the configured value, 80%"),
            (r#"{"share": {"max": "9%"}}"#, "share.max: a client may only set the configured value, 80%"),
            (r#"{"share": "9%"}"#, "share: the initial share must be from 10% to 80%"),
            (r#"{"share": {"initial": "60%", "max": "50%"}}"#, "the initial share must be from 10% to 50%"),
        ] {
            let refused = apply_client_changes(&config, "a", json).unwrap_err();
            assert!(refused.contains(words), "{json}: {refused}");
        }
        let fine = r#"{"share": {"initial": "80%", "min": "10%", "max": "80%"}}"#;
        apply_client_changes(&config, "a", fine).unwrap();
        // A client can undo a restriction that an earlier client command set, but only up to the
        // value that the operator wrote.
        let written = config.models[0].clone();
        config.models[0].share.max = Percent::new(30).unwrap();
        let again = |json| super::apply_client_changes(&config, &written, json);
        assert_eq!(again(r#"{"share": {"max": "80%"}}"#).unwrap().share.max.get(), 80);
        assert!(again(r#"{"share": {"max": "81%"}}"#).unwrap_err().starts_with("share.max: "));
    }

    #[test]
    fn missing_keys_stay_unchanged() {
        let (_dir, config) = config();
        assert_eq!(apply_client_changes(&config, "a", "{}").as_ref(), Ok(&config.models[0]));
        let changed = apply_client_changes(&config, "a", r#"{"share": "40%", "slo": "5ms"}"#).unwrap();
        assert_eq!((changed.share.initial.get(), changed.share.min.get()), (40, 10));
        assert_eq!(changed.slo.latency, std::time::Duration::from_millis(5));
        assert_eq!((changed.queue, changed.batch), (config.models[0].queue, config.models[0].batch.clone()));
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
        assert_eq!(slo(r#"{"slo": "5ms"}"#), crate::SloTarget { latency, next: None, percentile: 99.9 });
        assert_eq!(
            slo(r#"{"slo": {"percentile": 90}}"#),
            crate::SloTarget { percentile: 90.0, ..config.models[0].slo }
        );
    }

    #[test]
    fn a_load_reads_the_models_files_again() {
        let (dir, _) = config();
        let written = std::fs::read_to_string(dir.path().join("config.yaml")).unwrap();
        let file = dir.path().join("with-profile.yaml");
        std::fs::write(&file, written.replace("name: a,", "name: a, profile: p.yaml,")).unwrap();
        let mut config = crate::load(&file, &|_| None, false).unwrap();
        assert!(config.models[0].broken.as_ref().unwrap().contains("p.yaml: No such file"));
        (config.models[0].gpu, config.models[0].share.initial) = (7, Percent::new(25).unwrap());
        let table = "{source: {kind: illustrative}, execution_ms: {sms: [132], 1: [3.0]}}";
        std::fs::write(dir.path().join("p.yaml"), table).unwrap();
        let model = apply_client_changes(&config, "a", "{}").unwrap();
        assert_eq!((model.broken, model.profile.is_some()), (None, true));
        assert_eq!((model.gpu, model.share), (7, config.models[0].share));
    }

    #[test]
    fn every_fault_is_reported_and_a_client_cannot_choose_what_runs() {
        let (_dir, mut config) = config();
        config.models[0].batch.max_delay = std::time::Duration::from_millis(2);
        for (json, words) in [
            (r#"{"path": "/etc/passwd"}"#, "path: a client can set only `share` and `slo`; remove the key"),
            (r#"{"batch": {"max": 8}}"#, "batch: a client can set only `share` and `slo`; remove the key"),
            (r#"{"share": "400%"}"#, "share: invalid share `400%`"),
            (r#"{"share": {"mux": "8%"}}"#, "share.mux: unknown key; did you mean `max`?"),
            (r#"{"slo": "1ms", "slo": "3ms"}"#, "slo: duplicate key"),
            (r#"{"slo": "2ms"}"#, "slo: the latency must be longer than batch.max_delay, 2ms"),
            (r#"{"slo": "0ms"}"#, "slo: too short; use at least 1us"),
            ("[]", "must be a map"),
            ("{", "not valid YAML"),
            ("", "the file is empty"),
        ] {
            let refused = apply_client_changes(&config, "a", json).unwrap_err();
            assert!(refused.contains(words), "{json}: {refused}");
        }
        let both = apply_client_changes(&config, "a", r#"{"slo": "x", "priority": 0}"#).unwrap_err();
        assert!(both.contains("slo: ") && both.contains("priority: "), "{both}");
        let long = format!("{{\"slo\": \"{}ms\"}}", "0".repeat(MAX_BYTES));
        assert!(apply_client_changes(&config, "a", &long).unwrap_err().contains("at most 4096 are allowed"));
    }
}
