//! Reads the keys that decide whether a model shares its worker process with other models.

use std::collections::BTreeMap;

use shadowslice_shared::contention::ClientPriority;

use super::Context;
use super::keys::ISOLATIONS;
use super::models::is_model_name;
use super::reader::{Fields, Value};
use super::render::quoted;
use super::types::{EngineConfig, GpuConfig, HandoverMode, ModelConfig};

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

/// The number of processes that an MPS server accepts with CUDA 13.0 and earlier (measured on an H200).
/// Newer drivers accept more.
pub const MPS_CLIENTS: usize = 48;

/// The maximum number of workers in one shared process. Further workers of the same name start another
/// one.
pub const MAX_MEMBERS: usize = 256;

/// The processes that models need on a GPU under MPS.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MpsClients {
    /// The processes of workers and standbys.
    pub standing: usize,
    /// The models whose share changes by a hand-over to a shadow. During the change, each needs one more
    /// process. A model with `handover: auto` counts only if its engine cannot have partitions.
    pub shadows: usize,
}

impl MpsClients {
    /// Counts the processes of models on the same GPU.
    pub fn of<'m>(models: impl IntoIterator<Item = &'m ModelConfig>) -> Self {
        let (mut clients, mut members) = (Self::default(), BTreeMap::new());
        for model in models {
            // A standby is in another process than its worker.
            let workers = 1 + usize::from(model.standby);
            clients.shadows += usize::from(changes_by_shadow(model));
            match &model.shared_worker {
                None => clients.standing += workers,
                Some(name) => {
                    let key = |process| (name, ClientPriority::of(model.priority), process);
                    (0..workers).for_each(|process| *members.entry(key(process)).or_default() += 1);
                }
            }
        }
        clients.standing +=
            members.values().map(|members: &usize| members.div_ceil(MAX_MEMBERS)).sum::<usize>();
        clients
    }
}

/// Returns true if the share of the model can change, and only by a shadow.
fn changes_by_shadow(model: &ModelConfig) -> bool {
    let by_shadow = match model.handover {
        HandoverMode::Shadow => true,
        // The engines of TensorRT are built for one share of a process.
        HandoverMode::Auto => model.engine.has_tensorrt(),
        HandoverMode::InProcess | HandoverMode::Never => false,
    };
    by_shadow && model.share.min < model.share.max
}

/// Adds a note for each GPU under MPS whose models need more processes than some MPS servers accept. It is
/// not a fault, because newer drivers accept more.
pub(super) fn note_clients(
    models: &[ModelConfig],
    items: &[Value<'_>],
    gpus: &[GpuConfig],
    context: &Context<'_>,
) {
    for (gpu, _) in gpus.iter().enumerate().filter(|(_, gpu)| gpu.is_under_mps()) {
        let on_gpu = models.iter().zip(items).filter(|(model, _)| model.gpu == gpu && !model.gpu_auto);
        let (on_gpu, items): (Vec<&ModelConfig>, Vec<_>) = on_gpu.unzip();
        let needed = |count: usize| MpsClients::of(on_gpu[..count].iter().copied()).standing;
        if let Some(first) = (0..items.len()).find(|index| needed(index + 1) > MPS_CLIENTS) {
            context.note(
                items[first],
                format!(
                    "GPU {gpu} has more workers than the {MPS_CLIENTS} processes that MPS accepts with some drivers; run `shadowslice doctor` with this file, set `isolation: shared` for some models, or use another GPU"
                ),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn models(yaml: &str) -> Vec<ModelConfig> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("config.yaml");
        std::fs::write(folder.path().join("m.onnx"), "").unwrap();
        std::fs::write(&file, format!("run_dir: /run/x\ngpus: [{{device: 0}}]\nmodels:\n{yaml}")).unwrap();
        crate::load(&file, &|_| None, true).unwrap().models
    }

    fn clients(yaml: &str) -> (usize, usize) {
        let MpsClients { standing, shadows } = MpsClients::of(&models(yaml));
        (standing, shadows)
    }

    #[test]
    fn each_worker_and_each_standby_is_a_process() {
        let model = |more: &str| format!("- {{path: m.onnx, slo: 20ms{more}}}\n");
        assert_eq!(clients(&model("")), (1, 0));
        assert_eq!(clients(&model(", standby: always")), (2, 0));
        assert_eq!(clients(&model(", handover: shadow")), (1, 1));
        assert_eq!(clients(&model(", providers: [tensorrt, cuda]")), (1, 1));
        assert_eq!(clients(&model(", handover: never, share: {initial: 20%}")), (1, 0));
        assert_eq!(clients(&model(", handover: shadow, share: {min: 20%, initial: 20%, max: 20%}")), (1, 0));
    }

    #[test]
    fn shared_workers_are_counted_by_name_priority_and_standby() {
        let model = |name: usize, more: &str| {
            format!("- {{name: m{name}, path: m.onnx, slo: 20ms, isolation: shared{more}}}\n")
        };
        let same: String = (0..3).map(|name| model(name, "")).collect();
        assert_eq!(clients(&same), (1, 0));
        assert_eq!(clients(&(same.clone() + &model(3, ", worker: other"))), (2, 0));
        assert_eq!(clients(&(same.clone() + &model(3, ", standby: always"))), (2, 0));
        assert_eq!(clients(&(same.clone() + &model(3, ", priority: 2"))), (2, 0));
        let full = vec![models(&model(0, "")).remove(0); MAX_MEMBERS + 1];
        assert_eq!(MpsClients::of(&full).standing, 2, "a process has a maximum of workers");
    }
}
