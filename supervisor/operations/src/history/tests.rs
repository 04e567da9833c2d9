use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use super::*;
use crate::status::ModelStatus;

/// Returns the state `second` seconds after the first state, with an emulated GPU of 132 SMs in
/// groups of 44.
fn seen(second: u64, models: Vec<Value>) -> Snapshot {
    let gpu = json!({"index": 0, "device": "emulated", "uuid": null, "backend": "emulated", "sms": 132,
        "groups": [44, 44, 44], "mps_server_pid": null, "why": null, "nvml": null});
    let models: Vec<ModelStatus> =
        models.into_iter().map(|model| serde_json::from_value(model).unwrap()).collect();
    let status = json!({"host": "serving", "ready": true, "models": [], "gpus": [gpu]});
    let status = HostStatus { models, ..serde_json::from_value(status).unwrap() };
    let plan = json!({"policy": "adaptive", "act": true, "interval_ms": 100.0, "decisions": 1, "models": []});
    let at = *BEGAN + Duration::from_secs(second);
    Snapshot { at, status, plan: serde_json::from_value(plan).unwrap(), latencies: BTreeMap::new() }
}

static BEGAN: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);

fn model(name: &str, more: Value) -> Value {
    let boot =
        json!({"spawn": 0.0, "libraries": 0.0, "context": 0.0, "session": 0.0, "warmup": 0.0, "proof": 0.0});
    let mut model = json!({
        "name": name, "model": name, "version": 1, "state": "ready", "gpu": 0, "share_percent": 100, "sms": 132, "mechanism": "in-process",
        "groups": "all", "held": false, "queue": 0, "in_flight": 0, "worker_deaths": 0, "worker_restarts": 0,
        "batches": 0, "execution_ms": {}, "requests": counts(0, 0, 0),
        "latency_ms": {"p50": 0.0, "p99": 0.0},
        "slo": {"latency_ms": 20.0, "percentile": 99.0, "attainment": 1.0, "slack": null},
        "handovers": {"completed": 0, "aborted": 0, "rolled_back": 0, "flips": 0, "failovers": 0},
        "workers": [{"role": "incumbent", "pid": 7, "share_percent": 100, "sms": 132, "phase": "serving",
            "restarts": 0, "boot_ms": boot}],
    });
    for (key, value) in more.as_object().unwrap() {
        model[key] = value.clone();
    }
    model
}

fn counts(succeeded: u64, within_slo: u64, late: u64) -> Value {
    json!({"accepted": succeeded, "succeeded": succeeded, "within_slo": within_slo, "failed": 0,
        "rejected": late, "refused": {"late": late}, "retried": 0, "cancelled": 0})
}

fn between(before: &Snapshot, now: &Snapshot, refusing: &mut RefusalTracker) -> Value {
    serde_json::to_value(HistorySample::between(before, now, SystemTime::UNIX_EPOCH, refusing)).unwrap()
}

fn marks(before: Value, now: Value) -> Vec<(String, String)> {
    let sample = between(&seen(0, vec![before]), &seen(2, vec![now]), &mut RefusalTracker::default());
    events_of(&sample)
}

fn events_of(sample: &Value) -> Vec<(String, String)> {
    let text = |mark: &Value, key: &str| mark[key].as_str().unwrap().to_owned();
    let marks = sample.get("marks").and_then(Value::as_array).cloned().unwrap_or_default();
    marks.iter().map(|mark| (text(mark, "kind"), text(mark, "text"))).collect()
}

#[test]
fn a_sample_has_the_overload_and_the_rates_of_status() {
    let rates = json!({"window_s": 10.4, "requests": 180.0, "refused": 80.0, "failed": 0.0});
    let why =
        "a copy serves at most 100 requests/s within the SLO, but 180 requests/s arrive (over the last 10 s)";
    let now = seen(2, vec![model("m", json!({"rates": rates, "overload": why}))]);
    let sample = between(&seen(0, vec![model("m", json!({}))]), &now, &mut RefusalTracker::default());
    let model = &sample["models"][0];
    assert_eq!((&model["rate"], &model["refusals"]), (&180.0.into(), &80.0.into()));
    assert_eq!(model["why"], format!("overloaded: {why}"));
}

#[test]
fn rates_are_per_second_and_an_idle_model_has_none() {
    let before =
        seen(0, vec![model("busy", json!({"requests": counts(10, 10, 0)})), model("idle", json!({}))]);
    let more = json!({"requests": counts(50, 40, 6), "queue": 3, "queue_wait_s": 0.1});
    let mut now = seen(2, vec![model("busy", more), model("idle", json!({}))]);
    now.latencies.insert("busy".to_owned(), RecentLatencies { p50_ms: 4.2571, p99_ms: 1234.6 });
    let sample = between(&before, &now, &mut RefusalTracker::default());
    let busy = &sample["models"][0];
    assert_eq!((&busy["in_time"], &busy["late"], &busy["refused"]), (&15.0.into(), &5.0.into(), &3.0.into()));
    assert_eq!((&busy["p50_ms"], &busy["p99_ms"], &busy["queue"]), (&4.26.into(), &1235.0.into(), &3.into()));
    assert_eq!((busy.get("failed"), &busy["wait_ms"]), (None, &2.5.into()));
    let idle = sample["models"][1].as_object().unwrap();
    assert!(["in_time", "late", "refused", "p99_ms", "queue"].iter().all(|key| !idle.contains_key(*key)));
}

#[test]
fn a_model_that_was_replaced_counts_from_zero() {
    let before = seen(0, vec![model("m", json!({"requests": counts(1000, 1000, 90)}))]);
    let now = seen(2, vec![model("m", json!({"requests": counts(20, 20, 0)}))]);
    let sample = between(&before, &now, &mut RefusalTracker::default());
    assert_eq!((&sample["models"][0]["in_time"], events_of(&sample)), (&10.0.into(), Vec::new()));
}

#[test]
fn parts_of_sms_add_up_to_the_used_sms() {
    let parts = |models: Vec<Value>| -> Vec<f64> {
        let now = seen(2, models);
        let sample = between(&seen(0, Vec::new()), &now, &mut RefusalTracker::default());
        sample["models"].as_array().unwrap().iter().map(|model| model["part_sms"].as_f64().unwrap()).collect()
    };
    let placed = |groups: &str| model("m", json!({"groups": groups}));
    assert_eq!(parts(vec![placed("all"), placed("all")]), [66.0, 66.0]);
    assert_eq!(parts(vec![placed("all"), placed("0-1")]), [88.0, 44.0]);
    assert_eq!(parts(vec![placed("0"), placed("2")]), [44.0, 44.0]);
    let by_percentage = |share: u32| model("m", json!({"groups": null, "share_percent": share}));
    assert_eq!(parts(vec![by_percentage(30)]), [39.6]);
    assert_eq!(parts(vec![by_percentage(100), by_percentage(50)]), [88.0, 44.0]);
    assert_eq!(parts(vec![placed("all"), model("m", json!({"workers": []}))]), [132.0, 0.0]);
}

#[test]
fn events_come_once_with_their_reason() {
    let kinds = |events: &[(String, String)]| events.iter().map(|(kind, _)| kind.clone()).collect::<Vec<_>>();
    let died = json!({"worker_deaths": 1, "last_death": "killed by SIGKILL", "state": "restarting"});
    let death = marks(model("m", json!({})), model("m", died.clone()));
    assert_eq!(death, [("death".to_owned(), "a worker died: killed by SIGKILL".to_owned())]);
    assert_eq!(marks(model("m", died.clone()), model("m", died.clone())), []);
    let back = json!({"worker_deaths": 1, "last_death": "killed by SIGKILL"});
    assert_eq!(marks(model("m", died), model("m", back)), [("state".to_owned(), "ready again".to_owned())]);
    let unready = marks(model("m", json!({})), model("m", json!({"state": "unready", "why": "no file"})));
    assert_eq!(unready, [("state".to_owned(), "unready: no file".to_owned())]);
    let last = |outcome: &str| {
        json!({"completed": 3, "aborted": 0, "rolled_back": 0, "flips": 0, "failovers": 0,
            "last": {"outcome": outcome, "cause": "hand", "at_once": true, "why": null, "from_percent": 100,
                "to_percent": 50, "from_sms": 132, "to_sms": 66, "effect_ms": 1.0, "stall_us": 0.0,
                "stall_total_us": 0.0}})
    };
    let change = marks(model("m", json!({})), model("m", json!({"handovers": last("completed")})));
    assert_eq!(change[0].1, "100% -> 50% (66 SMs), completed; by hand (the last of 3)");
    let failed = marks(model("m", json!({})), model("m", json!({"handovers": last("aborted")})));
    assert_eq!((kinds(&change), kinds(&failed)), (vec!["change".to_owned()], vec!["failure".to_owned()]));
}

#[test]
fn refusals_are_an_event_at_first_and_again_after_half_a_minute_without() {
    let mut refusing = RefusalTracker::default();
    let mut before = seen(0, vec![model("m", json!({}))]);
    let mut all = Vec::new();
    // Requests are refused in samples 1, 2, 6 and 40.
    for second in 1..=50 {
        let late = [1, 2, 6, 40].iter().filter(|at| **at <= second).count() as u64;
        let now = seen(second, vec![model("m", json!({"requests": counts(0, 0, late)}))]);
        let events = events_of(&between(&before, &now, &mut refusing));
        all.extend(events.into_iter().map(|(_, text)| (second, text)));
        before = now;
    }
    let text = "refuses requests: late".to_owned();
    assert_eq!(all, [(1, text.clone()), (40, text)]);
}

#[test]
fn models_come_and_go() {
    let (none, one) = (seen(0, Vec::new()), seen(2, vec![model("m", json!({}))]));
    assert_eq!(events_of(&between(&none, &one, &mut RefusalTracker::default()))[0].1, "ready");
    let gone = Snapshot { at: one.at + Duration::from_secs(2), ..none };
    assert_eq!(events_of(&between(&one, &gone, &mut RefusalTracker::default()))[0].1, "removed");
}

#[test]
fn an_hour_is_stored_and_a_page_receives_all_of_it_once() {
    let history = History::default();
    let sample = |second| {
        let now = seen(second, vec![model("m", json!({"why": "x".repeat(50)}))]);
        HistorySample::between(
            &now,
            &now,
            SystemTime::UNIX_EPOCH + Duration::from_secs(second),
            &mut RefusalTracker::default(),
        )
    };
    for second in 0..2000 {
        history.push(&sample(second));
    }
    let (kept, mut news) = history.follow();
    assert_eq!(kept.len(), MAX_SAMPLES);
    assert!(kept[0].starts_with(b"data: {\"time\":200000,") && kept[0].ends_with(b"}\n\n"));
    history.push(&sample(2000));
    assert!(news.try_recv().unwrap().starts_with(b"data: {\"time\":2000000,"));
    assert!(news.try_recv().is_err());
}

#[test]
fn the_next_supervisor_shows_the_samples_of_the_previous_one_first() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("history");
    let (first, next) = (History::default(), History::default());
    assert!(next.take(&file).is_err(), "the file does not exist");
    let now = seen(2, vec![model("m", json!({"why": "two\n\nlines"}))]);
    let sample = HistorySample::between(&now, &now, SystemTime::UNIX_EPOCH, &mut RefusalTracker::default());
    first.push(&sample);
    first.push(&sample);
    first.leave(&file).unwrap();
    next.take(&file).unwrap();
    next.push(&sample);
    assert_eq!(next.follow().0, [first.follow().0, vec![first.follow().0[0].clone()]].concat());
    assert!(!file.try_exists().unwrap());
}

#[test]
fn samples_of_many_models_stay_within_the_limit() {
    let history = History::default();
    let many = (0..500).map(|place| model(&format!("model-{place}"), json!({"why": "x".repeat(200)})));
    let now = seen(2, many.collect());
    let sample = HistorySample::between(&now, &now, SystemTime::UNIX_EPOCH, &mut RefusalTracker::default());
    for _ in 0..200 {
        history.push(&sample);
    }
    let bytes: usize = history.follow().0.iter().map(Bytes::len).sum();
    assert!(bytes <= MAX_BYTES && bytes > MAX_BYTES * 9 / 10, "{bytes}");
}
