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

    /// Returns the diff if a key differs. A default share that equals a given one does not count, nor does
    /// another path of an equal profile.
    fn unless_empty(self) -> Option<Self> {
        let is_empty = self.in_place.is_empty() && self.needs_workers.is_empty();
        (!is_empty).then_some(self)
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
    // Without `..`, so that a new key does not compile until it is compared below.
    let ModelConfig {
        name: _,
        version: _,
        rollout: _,
        engine: _,
        gpu: _,
        gpu_auto: _,
        profile: _,
        profile_path: _,
        share: _,
        slo: _,
        batch: BatchConfig { max: _, sizes: _, max_delay: _ },
        queue: QueueConfig { max_requests: _, memory: _, on_late: _ },
        cache: _,
        openai: _,
        priority: _,
        handover: _,
        shared_worker: _,
        sleep: _,
        standby: _,
        cpus: _,
        memory_limit: _,
        warmup: _,
        broken: _,
    } = new;
    let needs_workers = [needs_workers(old, new), engine(&old.engine, &new.engine)].concat();
    ModelDiff { model: new.clone(), in_place: in_place(old, new), needs_workers }.unless_empty()
}

/// Returns whether another share needs new workers.
fn is_replaced_for_share(old: &ModelConfig, new: &ModelConfig) -> bool {
    new.share.initial != old.share.initial && new.handover == HandoverMode::Never
}

fn in_place(old: &ModelConfig, new: &ModelConfig) -> Vec<&'static str> {
    let same_share = new.share.initial == old.share.initial || is_replaced_for_share(old, new);
    let same_mode = new.handover == old.handover || !has_same_mechanism(new.handover, old.handover);
    differing(&[
        ("share.initial", same_share),
        ("share.min", new.share.min == old.share.min),
        ("share.max", new.share.max == old.share.max),
        ("slo", new.slo == old.slo),
        ("batch.max_delay", new.batch.max_delay == old.batch.max_delay),
        ("queue.on_late", new.queue.on_late == old.queue.on_late),
        ("priority", new.priority == old.priority),
        ("handover", same_mode),
        ("sleep", new.sleep == old.sleep),
        ("standby", new.standby == old.standby),
        ("openai", new.openai == old.openai),
        ("versions", new.version.folder == old.version.folder),
        ("rollout", new.rollout == old.rollout),
        ("gpu", new.gpu_auto == old.gpu_auto || new.gpu != old.gpu),
    ])
}

fn needs_workers(old: &ModelConfig, new: &ModelConfig) -> Vec<&'static str> {
    differing(&[
        ("share.initial", !is_replaced_for_share(old, new)),
        ("handover", has_same_mechanism(new.handover, old.handover)),
        ("gpu", new.gpu == old.gpu),
        ("profile", new.profile == old.profile),
        ("batch.max", new.batch.max == old.batch.max),
        ("batch.sizes", new.batch.sizes == old.batch.sizes),
        ("queue.max_requests", new.queue.max_requests == old.queue.max_requests),
        ("queue.memory", new.queue.memory == old.queue.memory),
        ("cache", new.cache == old.cache),
        ("cpus", new.cpus == old.cpus),
        isolation(new.shared_worker.as_ref(), old.shared_worker.as_ref()),
        ("memory", new.memory_limit == old.memory_limit),
        ("warmup", new.warmup == old.warmup),
        (FILES, new.broken == old.broken),
    ])
}

/// Returns whether a worker can change from one mode to the other. A worker starts either with a partition
/// or with a percentage.
fn has_same_mechanism(new: HandoverMode, old: HandoverMode) -> bool {
    new.may_be_in_process() == old.may_be_in_process()
}

/// Returns the key that decides which models share a worker process, and whether it is the same.
fn isolation(new: Option<&String>, old: Option<&String>) -> (&'static str, bool) {
    let key = if new.is_some() == old.is_some() { "worker" } else { "isolation" };
    (key, new == old)
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
