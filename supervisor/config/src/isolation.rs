//! Reads the keys that decide whether a model shares its worker process with other models.

use super::keys::ISOLATIONS;
use super::models::is_model_name;
use super::reader::{Fields, Value};
use super::render::quoted;
use super::types::{EngineConfig, HandoverMode, ModelConfig};

/// The name of the shared worker of models that give none.
const DEFAULT_WORKER: &str = "shared";

/// Returns the name of the shared worker, or `None` if the model has a process of its own.
pub(super) fn shared_worker(fields: &Fields<'_>) -> Option<String> {
    let is_shared: bool = fields.read("isolation", |value| value.one_of(&ISOLATIONS));
    let given = fields.optional("worker", worker_name);
    if !is_shared {
        if given.is_some() {
            fields.fault("worker", "only a model with `isolation: shared` has a shared worker; add that key");
        }
        return None;
    }
    let name = given.unwrap_or_else(|| DEFAULT_WORKER.to_owned());
    fields.show("worker", quoted(&name));
    Some(name)
}

fn worker_name(value: &Value<'_>) -> Option<String> {
    let name = value.text()?;
    if !is_model_name(name) {
        value.fault(format!("invalid worker name `{name}`; use letters, digits, `.`, `_` and `-`"));
    }
    Some(name.to_owned())
}

/// Records a fault for each key that needs a process of its own, if the model has a shared worker.
pub(super) fn check_shared(fields: &Fields<'_>, model: &ModelConfig) {
    if model.shared_worker.is_none() {
        return;
    }
    if matches!(model.engine, EngineConfig::Python { .. }) {
        fields.fault("isolation", "a Python model needs a process of its own; remove `isolation: shared`");
    }
    if model.engine.has_tensorrt() {
        fields.fault(
            "isolation",
            "TensorRT engines are built for one share of a process; remove `isolation: shared`, or `tensorrt`",
        );
    }
    if matches!(model.handover, HandoverMode::Shadow | HandoverMode::Never) {
        fields.fault(
            "handover",
            "in a shared worker, a share is a partition inside the process; use `auto` or `in-process`",
        );
    }
    if model.memory_limit.is_some() {
        fields.fault(
            "memory",
            "MPS limits the memory of a process, not of a model in a shared worker; remove `memory.limit`",
        );
    }
}
