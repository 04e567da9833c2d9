//! Creates replies of a simulated supervisor.

use serde_json::{Value, json};

use super::super::snapshot::TopReply;
use crate::status::{HostStatus, ModelStatus};
use shadowslice_control::controller::PlanReport;

pub(super) fn model(name: &str, more: Value) -> Value {
    let mut model = json!({
        "name": name, "state": "ready", "state_age_s": 12.4, "gpu": 0, "share_percent": 100, "sms": 132,
        "mechanism": "in-process", "groups": "all", "held": false, "queue": 0, "in_flight": 0,
        "worker_deaths": 0, "worker_restarts": 0, "batches": 0, "execution_ms": {}, "queue_wait_s": 0.0,
        "requests": {"accepted": 0, "succeeded": 0, "within_slo": 0, "failed": 0, "rejected": 0,
            "refused": {}, "retried": 0, "cancelled": 0},
        "latency_ms": {"p50": 0.0, "p99": 0.0},
        "slo": {"latency_ms": 20.0, "percentile": 99.0, "attainment": 1.0, "slack": null},
        "handovers": {"completed": 0, "aborted": 0, "rolled_back": 0, "flips": 0, "failovers": 0},
        "workers": [{"role": "incumbent", "pid": 4711, "share_percent": 100, "sms": 132, "phase": "serving",
            "restarts": 0, "boot_ms": boot(), "memory_mib": 1229,
            "memory": {"weights_mib": 98, "brought_mib": 98, "scratch_mib": 40}}],
    });
    merge(&mut model, more);
    model
}

pub(super) fn boot() -> Value {
    json!({"spawn": 0.0, "libraries": 0.0, "context": 0.0, "session": 0.0, "warmup": 0.0, "proof": 0.0})
}

pub(super) fn merge(into: &mut Value, more: Value) {
    match (into, more) {
        (Value::Object(into), Value::Object(more)) => {
            more.into_iter().for_each(|(key, value)| merge(into.entry(key).or_insert(Value::Null), value));
        }
        (into, more) => *into = more,
    }
}

/// Returns the fields of a model's status after `requests` requests.
pub(super) fn busy(requests: u64) -> Value {
    json!({
        "queue": 7, "in_flight": 4, "groups": "0-8", "share_percent": 60, "sms": 72, "share_age_s": 12.0,
        "queue_wait_s": requests as f64 * 0.003,
        "requests": {"accepted": requests, "succeeded": requests, "within_slo": requests - requests / 50,
            "rejected": requests / 10, "refused": {"late": requests / 10}},
        "latency_ms": {"p50": 4.26, "p99": 18.4},
        "slo": {"attainment": 0.9831, "slack": -0.25},
        "rates": {"window_s": 10.3, "requests": 110.0, "refused": 10.0, "failed": 0.0},
        "handovers": {"completed": 2, "last": {"outcome": "completed", "mechanism": "in-process",
            "cause": "policy", "at_once": true, "from_percent": 100, "to_percent": 60, "from_sms": 132,
            "to_sms": 72, "stall_us": 0.0, "stall_total_us": 0.0}},
    })
}

pub(super) fn gpu(index: usize, nvml: bool) -> Value {
    let nvml = nvml.then(|| {
        json!({"uuid": "GPU-5a7c", "name": "NVIDIA H200", "utilisation_percent": 37, "xid_errors": 0,
            "power_mw": 120_500, "power_limit_mw": 700_000, "energy_mj": null,
            "memory": {"used_mib": 2458, "free_mib": 140_000, "total_mib": 143_771}})
    });
    let (device, backend) =
        if nvml.is_some() { (index.to_string(), "mps") } else { ("emulated".into(), "emulated") };
    json!({"index": index, "device": device, "uuid": null, "backend": backend, "sms": 132,
        "groups": [8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 12], "why": null, "mps_server_pid": null,
        "nvml": nvml})
}

fn plan_of(name: &str) -> Value {
    json!({"name": name, "gpu": 0, "share_percent": 60, "sms": 72, "wanted_percent": 60, "wanted_sms": 72,
        "mechanism": "in-process", "groups": "0-8", "groups_shared_with": [], "held": false, "verdict": "keep",
        "why": "it makes room for digits, which missed 23.5 % of its requests", "not_ordered": null,
        "last_order_why": "72 SMs instead of 132: it makes room for digits",
        "door": {"max_batch": 8, "max_delay_ms": 0.0, "refuse_late": true},
        "seen": {"arrival_rate": 99.0, "p99_ms": 9.3, "attainment": 0.8, "busy": 0.97, "queued": 2}})
}

pub(super) fn seen(models: Vec<Value>, gpus: Vec<Value>) -> TopReply {
    let models = models.into_iter().map(|model| serde_json::from_value::<ModelStatus>(model).unwrap());
    let models: Vec<ModelStatus> = models.collect();
    let gpus = gpus.into_iter().map(|gpu| serde_json::from_value(gpu).unwrap()).collect();
    let plans = models.iter().filter(|model| model.share_percent == 60);
    let plans = plans.map(|model| serde_json::from_value(plan_of(&model.name)).unwrap()).collect();
    let (policy, act) = ("adaptive".to_owned(), true);
    let plan = PlanReport { policy, act, interval_ms: 100.0, decisions: 94, models: plans };
    let samples = models.iter().map(|model| serde_json::from_value(sample_of(model)).unwrap()).collect();
    TopReply { status: HostStatus { ready: true, models, gpus, ..empty() }, plan, samples }
}

fn sample_of(model: &ModelStatus) -> Value {
    match model.rates {
        None => json!({"name": model.name}),
        Some(rates) => json!({"name": model.name, "percentile": 99.0, "rate": rates.requests,
            "refusals": rates.refused, "p50_ms": 4.26, "p99_ms": 18.4, "wait_ms": 3.0,
            "in_time": 98.31, "late": 1.69}),
    }
}

fn empty() -> HostStatus {
    let own = json!({"version": "0.1.0", "pid": 77, "age_s": 10_000.0, "config": "/etc/a.yaml"});
    serde_json::from_value(json!({"supervisor": own, "models": [], "gpus": []})).unwrap()
}
