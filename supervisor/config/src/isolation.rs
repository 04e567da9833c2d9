//! Reads the keys that decide whether a model shares its worker process with other models.

use std::collections::BTreeSet;

use shadowslice_shared::contention::ClientPriority;

use super::Context;
use super::keys::ISOLATIONS;
use super::models::is_model_name;
use super::reader::{Fields, Value};
use super::render::quoted;
use super::types::{EngineConfig, GpuConfig, HandoverMode, ModelConfig, Partitioning};

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

/// The number of processes that every MPS server accepts. Newer drivers accept up to 60.
const MPS_CLIENTS: usize = 48;

/// Adds a note for each GPU under MPS whose models need more processes than the MPS server accepts. It is
/// not a fault, because some drivers accept more.
pub(super) fn note_clients(
    models: &[ModelConfig],
    items: &[Value<'_>],
    gpus: &[GpuConfig],
    context: &Context<'_>,
) {
    let under_mps =
        |(_, gpu): &(usize, &GpuConfig)| matches!(gpu, GpuConfig::Cuda { partition: Partitioning::Mps, .. });
    for (gpu, _) in gpus.iter().enumerate().filter(under_mps) {
        let on_gpu = models.iter().zip(items).filter(|(model, _)| model.gpu == gpu && !model.gpu_auto);
        let (mut processes, mut shared) = (0, BTreeSet::new());
        for (model, item) in on_gpu {
            let workers = 1 + usize::from(model.standby);
            processes += match &model.shared_worker {
                None => workers,
                Some(name) => {
                    let below = ClientPriority::of(model.priority);
                    let added = (0..workers).filter(|process| shared.insert((name, below, *process)));
                    added.count()
                }
            };
            if processes > MPS_CLIENTS {
                context.note(
                    item,
                    format!(
                        "GPU {gpu} has more workers than the {MPS_CLIENTS} processes that MPS accepts with some drivers; set `isolation: shared` for some models, or use another GPU"
                    ),
                );
                break;
            }
        }
    }
}
