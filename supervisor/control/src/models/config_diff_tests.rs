use std::path::Path;

use super::*;

const LINE: &str = "engine: emulated, slo: 20ms";
const TENSORS: &str = "tensors: [{input: x, output: y, datatype: FP32, shape: [4]}]";

/// Returns a configuration with these models, each with its keys, and with `more` top-level keys.
fn config(models: &[(&str, &str)], more: &str) -> Config {
    let dir = tempfile::tempdir().unwrap();
    let line = |(name, keys): &(&str, &str)| {
        let tensors = if keys.contains("tensors:") { "" } else { TENSORS };
        let slo = if keys.contains("slo:") { "engine: emulated" } else { LINE };
        let keys = [*keys, tensors].into_iter().filter(|keys| !keys.is_empty()).collect::<Vec<_>>();
        format!("  - {{name: {name}, {slo}, {}}}\n", keys.join(", "))
    };
    let models: String = models.iter().map(line).collect();
    let control = if more.contains("gpus:") { "" } else { "gpus: [{device: emulated, sms: 132}]\n" };
    let run_dir = if more.contains("run_dir:") { "" } else { "run_dir: /tmp/x\n" };
    let yaml = format!("{run_dir}{control}{more}\nmodels:\n{models}");
    let file = dir.path().join("config.yaml");
    std::fs::write(&file, &yaml).unwrap();
    shadowslice_config::load(Path::new(&file), &|_| None, false)
        .unwrap_or_else(|error| panic!("{yaml}: {error}"))
}

pub(in crate::models) fn one(keys: &str) -> Config {
    config(&[("a", keys)], "")
}

/// Returns the keys that differ between two configurations of a model: those that change in place, and
/// those that need new workers.
fn differ(old: &str, new: &str) -> (Vec<&'static str>, Vec<&'static str>) {
    let diff = compare(&one(old), &one(new)).unwrap();
    assert!(diff.added.is_empty() && diff.removed.is_empty());
    diff.changed.into_iter().next().map(|change| (change.in_place, change.needs_workers)).unwrap_or_default()
}

#[test]
fn models_come_go_and_stay() {
    let old = config(&[("a", "share: {initial: 30%}"), ("b", "share: {initial: 30%}")], "");
    let new = config(&[("c", "share: {initial: 20%}"), ("a", "share: {initial: 30%}")], "");
    let diff = compare(&old, &new).unwrap();
    assert_eq!(diff.removed, ["b"]);
    assert_eq!(diff.added.iter().map(|model| model.name.as_str()).collect::<Vec<_>>(), ["c"]);
    assert_eq!(diff.changed, []);
    assert_eq!(super::compare(&old, &old), Ok(ConfigDiff::default()));
}

#[test]
fn default_shares_that_follow_from_the_number_of_models_change_nothing_where_a_policy_sets_them() {
    let two = |controller| config(&[("a", "priority: 1"), ("b", "priority: 1")], controller);
    let three =
        |controller| config(&[("a", "priority: 1"), ("b", "priority: 1"), ("c", "priority: 1")], controller);
    let changed = |controller| compare(&two(controller), &three(controller)).unwrap().changed.len();
    assert_eq!(["", "controller: {policy: static}"].map(changed), [0, 2]);
}

#[test]
fn what_takes_a_restart_is_refused_whole_with_every_key() {
    let old = one("");
    for (more, keys) in [
        ("run_dir: /tmp/y", vec!["run_dir"]),
        ("gpus: [{device: emulated, sms: 66}]", vec!["gpus"]),
        ("listen: {http: [\"127.0.0.1:1234\"]}", vec!["listen"]),
        ("limits: {in_flight: 7}\ntimeouts: {stop: 1s}", vec!["limits", "timeouts"]),
        ("timeouts: {lame_duck: 1s}", vec!["timeouts"]),
        ("controller: {policy: static}", vec!["controller"]),
        ("onnxruntime: {library: /x.so}", vec!["onnxruntime"]),
        ("model_control: explicit", vec!["model_control"]),
        ("control: {groups: [ml]}", vec!["control"]),
        ("tenants: {a: {weight: 3}}", vec!["tenants"]),
        ("tracing: {otlp: \"http://c:1\"}", vec!["tracing"]),
        ("access_log: /tmp/access.jsonl", vec!["access_log"]),
    ] {
        let refused = compare(&old, &config(&[("a", ""), ("b", "")], more)).unwrap_err();
        assert_eq!(refused, FixedKeys(keys.clone()));
        assert!(keys.iter().all(|key| refused.to_string().contains(key)), "{refused}");
    }
    assert_eq!(compare(&old, &config(&[("a", "")], "start: strict")), Ok(ConfigDiff::default()));
}

#[test]
fn of_tracing_the_sample_changes_in_place() {
    let of = |keys| config(&[("a", "")], &format!("tracing: {{{keys}}}"));
    let old = of("otlp: \"http://c:1\"");
    assert_eq!(compare(&old, &old), Ok(ConfigDiff::default()));
    let sampled = compare(&old, &of("otlp: \"http://c:1\", sample: 100%")).unwrap();
    assert_eq!(sampled, ConfigDiff { sample: SampleRate::new(SampleRate::ALL), ..ConfigDiff::default() });
    for keys in ["otlp: \"http://c:2\"", "otlp: \"http://c:1\", service: s"] {
        assert_eq!(compare(&old, &of(keys)), Err(FixedKeys(vec!["tracing"])), "{keys}");
    }
    assert_eq!(compare(&old, &one("")), Err(FixedKeys(vec!["tracing"])));
}

#[test]
fn each_key_changes_in_place_or_takes_new_workers() {
    let in_place = [
        ("slo: 30ms", "slo"),
        ("priority: 2", "priority"),
        ("share: {min: 10%}", "share.min"),
        ("share: {initial: 40%}", "share.initial"),
        ("batch: {max_delay: 3ms}", "batch.max_delay"),
        ("queue: {on_late: serve}", "queue.on_late"),
        ("standby: always", "standby"),
        ("openai: {embeddings: {input: x, embedding: y}}", "openai"),
    ];
    for (keys, named) in in_place {
        assert_eq!(differ("", keys), (vec![named], vec![]), "{keys}");
    }
    let needs_workers = [
        ("batch: {max: 4}", "batch.max"),
        ("queue: {max_requests: 7}", "queue.max_requests"),
        ("queue: {memory: 128Mi}", "queue.memory"),
        ("cache: {size: 1Mi}", "cache"),
        ("cpus: [0]", "cpus"),
        ("tensors: [{input: x, output: y, datatype: FP32, shape: [8]}]", "tensors"),
    ];
    for (keys, named) in needs_workers {
        let (in_place, needs_workers) = differ("", keys);
        assert!(
            in_place.is_empty() && needs_workers.contains(&named),
            "{keys}: {in_place:?} {needs_workers:?}"
        );
    }
}

#[test]
fn a_worker_with_partitions_is_another_than_one_without() {
    let handover = |old: &str, new: &str| differ(&format!("handover: {old}"), &format!("handover: {new}"));
    for (old, new) in [("shadow", "never"), ("never", "shadow"), ("auto", "in-process")] {
        assert_eq!(handover(old, new), (vec!["handover"], vec![]), "{old} to {new}");
    }
    for (old, new) in [("auto", "shadow"), ("shadow", "in-process"), ("in-process", "never")] {
        assert_eq!(handover(old, new), (vec![], vec!["handover"]), "{old} to {new}");
    }
}

#[test]
fn a_share_that_may_not_be_handed_over_takes_new_workers() {
    let old = "handover: never, share: {initial: 40%}";
    assert_eq!(differ(old, "handover: never, share: {initial: 50%}"), (vec![], vec!["share.initial"]));
    let free = differ(old, "handover: shadow, share: {initial: 50%}");
    assert_eq!(free, (vec!["share.initial", "handover"], vec![]));
}

#[test]
fn what_makes_the_host_ready_changes_in_place() {
    let ready = |more| config(&[("a", ""), ("b", "")], more);
    let diff = compare(&ready(""), &ready("ready: [b]")).unwrap();
    assert_eq!(
        diff,
        ConfigDiff { ready: Some(ReadyConfig::Each(vec!["b".to_owned()])), ..ConfigDiff::default() }
    );
    assert_eq!(super::compare(&ready("ready: all"), &ready("ready: all")), Ok(ConfigDiff::default()));
}

/// Files that say the same in two ways change nothing.
#[test]
fn another_form_is_no_change() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &[u8]| std::fs::write(dir.path().join(name), text).unwrap();
    std::fs::create_dir(dir.path().join("models")).unwrap();
    file("m.onnx", b"\x08\x09\x3a\x07\x12\x05graph");
    file("p.yaml", b"{source: {kind: illustrative}, execution_ms: {sms: [132], 1: [4.0]}}");
    file("q.yaml", b"# Equal.\nexecution_ms: {1: [4], sms: [132]}\nsource:\n  kind: illustrative\n");
    let read = |text: &str| {
        let path = dir.path().join("config.yaml");
        std::fs::write(&path, text).unwrap();
        shadowslice_config::load(&path, &|_| None, false).unwrap_or_else(|error| panic!("{text}: {error}"))
    };
    let one = read(
        "run_dir: /tmp/x
listen: {http: [\"unix:http.sock\"]}
gpus: [{device: emulated}]
model_control: {users: [b, a], groups: [2, 1]}
control: {users: [b, a]}
workers: {environment: [B, A]}
ready: [b, a]
limits: {request_bytes: 64Mi}
models:
  - {name: a, path: m.onnx, slo: 20ms, profile: p.yaml, cpus: [1, 0], batch: {max: 8}}
  - {name: b, path: m.onnx, slo: 1s, warmup: {x: [4], y: [5]}}
",
    );
    let other = read(
        "# The same.
models:
- slo:
    percentile: 99.0
    latency: 0.02s
  path: ./models/../m.onnx
  batch: {sizes: [1, 2, 4, 8], max_delay: 0ms, max: 8}
  cpus: [0, 1]
  profile: q.yaml
  name: \"a\"
  share: {min: 2%, initial: 50%, max: 100%}
  priority: 1
  handover: auto
  gpu: 0
- {slo: 1000ms, warmup: {y: [5], x: [4]}, name: b, path: models/../m.onnx, queue: {max_requests: 1024, memory: 268435456}}
limits: {request_bytes: 67108864, response_bytes: 65536Ki}
ready: [a, b]
workers: {environment: [A, B]}
control: {users: [a, b]}
model_control: {groups: [1, 2], users: [a, b]}
gpus:
  - {sms: 132, device: emulated}
controller: {policy: adaptive, interval: 0.1s}
listen:
  http: [{address: \"unix:/tmp/x/http.sock\", mode: \"0660\"}]
run_dir: /tmp/../tmp/x
start: lenient
",
    );
    assert_eq!(compare(&one, &other), Ok(ConfigDiff::default()));
    assert_eq!(compare(&one, &read(&shadowslice_config::render(&one))), Ok(ConfigDiff::default()));
}
