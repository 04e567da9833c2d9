//! What a new configuration changes. Pure.

use std::collections::HashMap;

use shadowslice_shared::units::Percent;

use shadowslice_config::{
    BatchConfig, Config, EngineConfig, HandoverMode, ModelConfig, QueueConfig, ReadyConfig, SampleRate,
    ShareConfig, TracingConfig,
};

#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Plan {
    pub(super) removed: Vec<String>,
    pub(super) added: Vec<ModelConfig>,
    pub(super) changed: Vec<Change>,
    /// The part of the requests that are traced, if that differs.
    pub(super) sample: Option<SampleRate>,
    /// Which models make the host ready, if that differs.
    pub(super) ready: Option<ReadyConfig>,
}

/// A model that stays and differs. Keys are named as the configuration has them.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Change {
    pub(super) model: ModelConfig,
    /// What its controller and its pipeline take over as they are.
    pub(super) in_place: Vec<&'static str>,
    /// What takes new workers, and a new queue.
    pub(super) anew: Vec<&'static str>,
}

impl Change {
    /// No change of the configuration: only the model's files are read again.
    pub(super) fn again(model: &ModelConfig) -> Self {
        Self { model: model.clone(), in_place: Vec::new(), anew: vec!["its files"] }
    }

    /// The model's files have changed, so that workers in place would serve the former ones.
    pub(super) fn reads_files(&mut self) {
        if !self.anew.contains(&"its files") {
            self.anew.push("its files");
        }
    }

    pub(super) fn keys(&self) -> Vec<&'static str> {
        self.in_place.iter().chain(&self.anew).copied().collect()
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a reload cannot change {}; run `shadowslice upgrade` (for run_dir, restart), or undo the change and reload again", .0.join(", "))]
pub(super) struct Fixed(pub(super) Vec<&'static str>);

/// From the configuration in force to the new one. `start` says how to start, and may differ.
pub(super) fn plan(old: &Config, new: &Config) -> Result<Plan, Fixed> {
    let fixed = fixed(old, new);
    if !fixed.is_empty() {
        return Err(Fixed(fixed));
    }
    let mut before: HashMap<&str, &ModelConfig> = names(&old.models);
    let ready = (new.ready != old.ready).then(|| new.ready.clone());
    let mut plan = Plan { sample: sample(old, new), ready, ..Plan::default() };
    for model in &new.models {
        match before.remove(model.name.as_str()) {
            None => plan.added.push(model.clone()),
            Some(old) => plan.changed.extend(change(old, &with_share_of(old, model, new))),
        }
    }
    let gone = |model: &&ModelConfig| before.contains_key(model.name.as_str());
    plan.removed = old.models.iter().filter(gone).map(|model| model.name.clone()).collect();
    Ok(plan)
}

/// Where a policy sets shares, a default share that follows from the number of models changes nothing.
fn with_share_of(old: &ModelConfig, model: &ModelConfig, config: &Config) -> ModelConfig {
    let mut model = model.clone();
    if config.controller.acting_policy().is_some() && !old.share.given && !model.share.given {
        model.share.initial = old.share.initial.clamp(model.share.min, model.share.max);
    }
    model
}

fn names(models: &[ModelConfig]) -> HashMap<&str, &ModelConfig> {
    models.iter().map(|model| (model.name.as_str(), model)).collect()
}

/// The keys that differ and must not.
fn fixed(old: &Config, new: &Config) -> Vec<&'static str> {
    // Without `..`, so that a new key does not compile until it is listed here.
    let Config {
        run_dir,
        listen,
        gpus,
        controller,
        limits,
        timeouts,
        lame_duck,
        onnxruntime,
        workers,
        control,
        model_control,
        tracing,
        access_log,
        models: _,
        strict_start: _,
        ready: _,
        file_faults: _,
        host_faults: _,
        notes: _,
    } = new;
    let same = [
        ("run_dir", *run_dir == old.run_dir),
        // Its Unix sockets lie in the run directory.
        ("listen", *listen == old.listen || *run_dir != old.run_dir),
        ("gpus", *gpus == old.gpus),
        ("controller", *controller == old.controller),
        ("limits", *limits == old.limits),
        ("timeouts", (timeouts, lame_duck) == (&old.timeouts, &old.lame_duck)),
        ("onnxruntime", *onnxruntime == old.onnxruntime),
        ("workers", *workers == old.workers),
        ("control", *control == old.control),
        ("model_control", *model_control == old.model_control),
        ("tracing", but_sample(tracing.as_ref()) == but_sample(old.tracing.as_ref())),
        ("access_log", *access_log == old.access_log),
    ];
    same.into_iter().filter(|(_, same)| !same).map(|(key, _)| key).collect()
}

fn but_sample(tracing: Option<&TracingConfig>) -> Option<(&str, &str)> {
    tracing.map(|TracingConfig { otlp, service, sample: _ }| (otlp.as_str(), service.as_str()))
}

fn sample(old: &Config, new: &Config) -> Option<SampleRate> {
    let of = |config: &Config| config.tracing.as_ref().map(|tracing| tracing.sample);
    of(new).filter(|_| of(old) != of(new))
}

pub(super) fn change(old: &ModelConfig, new: &ModelConfig) -> Option<Change> {
    let ModelConfig {
        name: _,
        engine: _,
        gpu,
        gpu_auto,
        profile,
        profile_path: _,
        share,
        slo,
        batch: BatchConfig { max, sizes, max_delay },
        queue: QueueConfig { max_requests, memory, on_late },
        priority,
        handover,
        standby,
        cpus,
        memory_limit,
        warmup,
        broken,
    } = new;
    // Under `handover: never` another share needs new workers.
    let moves = share.initial == old.share.initial || *handover != HandoverMode::Never;
    // A worker is started with a partition or with a percentage, and keeps to that.
    let same_means = handover.may_be_in_process() == old.handover.may_be_in_process();
    let in_place = [
        ("share.initial", share.initial == old.share.initial || !moves),
        ("share.min", share.min == old.share.min),
        ("share.max", share.max == old.share.max),
        ("slo", *slo == old.slo),
        ("batch.max_delay", *max_delay == old.batch.max_delay),
        ("queue.on_late", *on_late == old.queue.on_late),
        ("priority", *priority == old.priority),
        ("handover", *handover == old.handover || !same_means),
        ("standby", *standby == old.standby),
        ("gpu", *gpu_auto == old.gpu_auto || *gpu != old.gpu),
    ];
    let anew = [
        ("share.initial", moves),
        ("handover", same_means),
        ("gpu", *gpu == old.gpu),
        ("profile", *profile == old.profile),
        ("batch.max", *max == old.batch.max),
        ("batch.sizes", *sizes == old.batch.sizes),
        ("queue.max_requests", *max_requests == old.queue.max_requests),
        ("queue.memory", *memory == old.queue.memory),
        ("cpus", *cpus == old.cpus),
        ("memory", *memory_limit == old.memory_limit),
        ("warmup", *warmup == old.warmup),
        ("its files", *broken == old.broken),
    ];
    let differ = |keys: &[(&'static str, bool)]| -> Vec<&'static str> {
        keys.iter().filter(|(_, same)| !same).map(|(key, _)| *key).collect()
    };
    let mut anew = differ(&anew);
    anew.extend(engine(&old.engine, &new.engine));
    let in_place = differ(&in_place);
    // Whether a share is given or the default, and where an equal profile lies, changes nothing.
    (!in_place.is_empty() || !anew.is_empty()).then(|| Change { model: new.clone(), in_place, anew })
}

fn engine(old: &EngineConfig, new: &EngineConfig) -> Vec<&'static str> {
    let same = match (old, new) {
        (
            EngineConfig::OnnxRuntime { path: old_path, threads: old_threads, providers: old_providers },
            EngineConfig::OnnxRuntime { path, threads, providers },
        ) => vec![
            ("path", path == old_path),
            ("threads", threads == old_threads),
            ("providers", providers == old_providers),
        ],
        (EngineConfig::Emulated { tensors: old }, EngineConfig::Emulated { tensors }) => {
            vec![("tensors", tensors == old)]
        }
        (
            EngineConfig::Python { path: old_path, interpreter: old_interpreter, threads: old_threads },
            EngineConfig::Python { path, interpreter, threads },
        ) => vec![
            ("path", path == old_path),
            ("python", interpreter == old_interpreter),
            ("threads", threads == old_threads),
        ],
        (
            EngineConfig::OnnxRuntime { .. } | EngineConfig::Python { .. } | EngineConfig::Emulated { .. },
            _,
        ) => {
            vec![("engine", false)]
        }
    };
    same.into_iter().filter(|(_, same)| !same).map(|(key, _)| key).collect()
}

/// The share that a model has after its configuration changed, where no policy sets it: the new
/// `initial` if it differs from the old one, else the share in force; within the new bounds.
pub(super) fn share(in_force: Percent, old: &ShareConfig, new: &ShareConfig) -> Percent {
    let wanted = if new.initial == old.initial { in_force } else { new.initial };
    wanted.clamp(new.min, new.max)
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
