//! The changes between two configurations. Pure.

use std::collections::HashMap;

use shadowslice_config::{
    BatchConfig, Config, EngineConfig, HandoverMode, ModelConfig, QueueConfig, ReadyConfig, SampleRate,
    TracingConfig,
};

/// The name of a change that is not one of the configuration: the model's files must be read again.
const FILES: &str = "its files";

/// The changes from the configuration in force to a new one.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct ConfigDiff {
    pub(super) removed: Vec<String>,
    pub(super) added: Vec<ModelConfig>,
    pub(super) changed: Vec<ModelDiff>,
    /// The new fraction of requests that are traced, if it differs.
    pub(super) sample: Option<SampleRate>,
    /// The new rule for the readiness of the host, if it differs.
    pub(super) ready: Option<ReadyConfig>,
}

/// The changes of one model that stays. Keys have the names that the configuration uses.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ModelDiff {
    pub(super) model: ModelConfig,
    /// The keys that the controller and the pipeline apply while the workers continue.
    pub(super) in_place: Vec<&'static str>,
    /// The keys that need new workers and a new queue.
    pub(super) needs_workers: Vec<&'static str>,
}

impl ModelDiff {
    /// Returns the diff of a model whose configuration stays, and whose files must be read again.
    pub(super) fn again(model: &ModelConfig) -> Self {
        Self { model: model.clone(), in_place: Vec::new(), needs_workers: vec![FILES] }
    }

    /// Adds that the model's files must be read again.
    pub(super) fn reads_files(&mut self) {
        if !self.reads_its_files() {
            self.needs_workers.push(FILES);
        }
    }

    pub(super) fn reads_its_files(&self) -> bool {
        self.needs_workers.contains(&FILES)
    }

    pub(super) fn keys(&self) -> Vec<&'static str> {
        self.in_place.iter().chain(&self.needs_workers).copied().collect()
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a reload cannot change {}; run `shadowslice upgrade` (for run_dir, restart), or undo the change and reload again", .0.join(", "))]
pub(super) struct FixedKeys(pub(super) Vec<&'static str>);

/// Compares the configuration in force with a new one. The key `start` only matters for a start, so it
/// may differ.
///
/// # Errors
///
/// Returns the keys that differ and that only a restart or an upgrade can change.
pub(super) fn compare(old: &Config, new: &Config) -> Result<ConfigDiff, FixedKeys> {
    let fixed = fixed(old, new);
    if !fixed.is_empty() {
        return Err(FixedKeys(fixed));
    }
    let mut before: HashMap<&str, &ModelConfig> =
        old.models.iter().map(|model| (model.name.as_str(), model)).collect();
    let ready = (new.ready != old.ready).then(|| new.ready.clone());
    let mut diff = ConfigDiff { sample: sample(old, new), ready, ..ConfigDiff::default() };
    for model in &new.models {
        match before.remove(model.name.as_str()) {
            None => diff.added.push(model.clone()),
            Some(old) => diff.changed.extend(change(old, &with_share_of(old, model, new))),
        }
    }
    let gone = |model: &&ModelConfig| before.contains_key(model.name.as_str());
    diff.removed = old.models.iter().filter(gone).map(|model| model.name.clone()).collect();
    Ok(diff)
}

/// Returns `model` without a changed default share, if a policy sets shares. The default share follows
/// from the number of models.
fn with_share_of(old: &ModelConfig, model: &ModelConfig, config: &Config) -> ModelConfig {
    let mut model = model.clone();
    if config.controller.acting_policy().is_some() && !old.share.given && !model.share.given {
        model.share.initial = old.share.initial.clamp(model.share.min, model.share.max);
    }
    model
}

/// Returns the keys that differ and must not.
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
        tenants,
        tracing,
        access_log,
        models: _,
        strict_start: _,
        ready: _,
        file_faults: _,
        host_faults: _,
        notes: _,
        document: _,
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
        ("tenants", *tenants == old.tenants),
        ("tracing", but_sample(tracing.as_ref()) == but_sample(old.tracing.as_ref())),
        ("access_log", *access_log == old.access_log),
    ];
    differing(&same)
}

fn but_sample(tracing: Option<&TracingConfig>) -> Option<(&str, &str)> {
    tracing.map(|TracingConfig { otlp, service, sample: _ }| (otlp.as_str(), service.as_str()))
}

fn sample(old: &Config, new: &Config) -> Option<SampleRate> {
    let of = |config: &Config| config.tracing.as_ref().map(|tracing| tracing.sample);
    of(new).filter(|_| of(old) != of(new))
}

/// Returns the changes of a model, or `None` if no key differs.
pub(super) fn change(old: &ModelConfig, new: &ModelConfig) -> Option<ModelDiff> {
    let ModelConfig {
        name: _,
        version: _,
        rollout,
        engine: _,
        gpu,
        gpu_auto,
        profile,
        profile_path: _,
        share,
        slo,
        batch: BatchConfig { max, sizes, max_delay },
        queue: QueueConfig { max_requests, memory, on_late },
        cache,
        openai,
        priority,
        handover,
        shared_worker,
        sleep,
        standby,
        cpus,
        memory_limit,
        warmup,
        broken,
    } = new;
    // With `handover: never`, another share needs new workers.
    let moves = share.initial == old.share.initial || *handover != HandoverMode::Never;
    // A worker starts either with a partition or with a percentage, and cannot change this.
    let same_mechanism = handover.may_be_in_process() == old.handover.may_be_in_process();
    let in_place = [
        ("share.initial", share.initial == old.share.initial || !moves),
        ("share.min", share.min == old.share.min),
        ("share.max", share.max == old.share.max),
        ("slo", *slo == old.slo),
        ("batch.max_delay", *max_delay == old.batch.max_delay),
        ("queue.on_late", *on_late == old.queue.on_late),
        ("priority", *priority == old.priority),
        ("handover", *handover == old.handover || !same_mechanism),
        ("sleep", *sleep == old.sleep),
        ("standby", *standby == old.standby),
        ("openai", *openai == old.openai),
        ("rollout", *rollout == old.rollout),
        ("gpu", *gpu_auto == old.gpu_auto || *gpu != old.gpu),
    ];
    let needs_workers = [
        ("share.initial", moves),
        ("handover", same_mechanism),
        ("gpu", *gpu == old.gpu),
        ("profile", *profile == old.profile),
        ("batch.max", *max == old.batch.max),
        ("batch.sizes", *sizes == old.batch.sizes),
        ("queue.max_requests", *max_requests == old.queue.max_requests),
        ("queue.memory", *memory == old.queue.memory),
        ("cache", *cache == old.cache),
        ("cpus", *cpus == old.cpus),
        ("isolation", shared_worker.is_some() == old.shared_worker.is_some()),
        ("worker", is_same_worker(shared_worker.as_ref(), old.shared_worker.as_ref())),
        ("memory", *memory_limit == old.memory_limit),
        ("warmup", *warmup == old.warmup),
        (FILES, *broken == old.broken),
    ];
    let in_place = differing(&in_place);
    let needs_workers = [differing(&needs_workers), engine(&old.engine, &new.engine)].concat();
    // A default share that equals a given one does not count, nor does another path of an equal profile.
    let differs = !in_place.is_empty() || !needs_workers.is_empty();
    differs.then(|| ModelDiff { model: new.clone(), in_place, needs_workers })
}

/// Returns false if both are shared workers with different names.
fn is_same_worker(new: Option<&String>, old: Option<&String>) -> bool {
    new == old || new.is_none() || old.is_none()
}

/// Returns the keys without `true`, which means that both configurations have the same value.
fn differing(same: &[(&'static str, bool)]) -> Vec<&'static str> {
    same.iter().filter(|(_, same)| !same).map(|(key, _)| *key).collect()
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
            EngineConfig::Python {
                path: old_path,
                interpreter: old_interpreter,
                threads: old_threads,
                step_timeout: old_step_timeout,
            },
            EngineConfig::Python { path, interpreter, threads, step_timeout },
        ) => vec![
            ("path", path == old_path),
            ("python", interpreter == old_interpreter),
            ("threads", threads == old_threads),
            ("step_timeout", step_timeout == old_step_timeout),
        ],
        (
            EngineConfig::OnnxRuntime { .. } | EngineConfig::Python { .. } | EngineConfig::Emulated { .. },
            _,
        ) => {
            vec![("engine", false)]
        }
    };
    differing(&same)
}

#[cfg(test)]
#[path = "config_diff_tests.rs"]
pub(super) mod tests;
