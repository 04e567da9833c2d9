//! Reads the key `models`.

use std::collections::BTreeMap;
use std::time::Duration;

use shadowslice_shared::profile::Profile;
use shadowslice_shared::units::Sms;

use super::host::Host;
use super::keys::{HANDOVERS, STANDBYS};
use super::reader::{Fields, Value};
use super::render::quoted;
use super::types::{
    ControllerConfig, EngineConfig, GpuConfig, LimitsConfig, ModelConfig, Partitioning, SloTarget,
    WarmupConfig, WarmupInput,
};
use super::versions::{self, VersionSource};
use super::{
    Context, absolute, batch, engine, isolation, openai, profile, rollout, shares, sleep, units, warmup,
};

/// The sections of the configuration that are needed to check a model.
pub(super) struct Sections<'a> {
    pub(super) gpus: &'a [GpuConfig],
    pub(super) limits: &'a LimitsConfig,
    pub(super) controller: &'a ControllerConfig,
}

pub(super) fn models(root: &Fields<'_>, sections: &Sections<'_>, context: &Context<'_>) -> Vec<ModelConfig> {
    let gpus = sections.gpus;
    let why = "give for example `models: [{path: digits.onnx, slo: 20ms}]`";
    let Some(list) = root.required("models", why) else { return Vec::new() };
    // A model has an instance for each version. `items` contains the item of each instance.
    let (mut models, mut items, mut names) = (Vec::new(), Vec::new(), BTreeMap::new());
    for item in list.items() {
        let fields = item.fields();
        for source in versions::sources(&fields, context) {
            models.push(model(&fields, &source, sections, context));
            items.push(item.clone());
        }
        check_name(&fields, &item, &mut names);
    }
    shares::check_sums(&models, &items, gpus.len());
    isolation::note_clients(&models, &items, gpus, context);
    shares::set_initial_shares(&mut models);
    models
}

/// Records a fault if another model has the name. `lines` contains the lines of the models by name.
fn check_name(fields: &Fields<'_>, item: &Value<'_>, lines: &mut BTreeMap<String, usize>) {
    let name = name(fields);
    match lines.get(&name) {
        Some(first) => fields
            .fault("name", format!("the model in line {first} is named `{name}` too; use different names")),
        None if name.is_empty() => {}
        None => {
            lines.insert(name, item.line());
        }
    }
}

/// Reads a version of a model. The initial share is set later, when all models have been read.
pub(super) fn model(
    fields: &Fields<'_>,
    source: &VersionSource,
    sections: &Sections<'_>,
    context: &Context<'_>,
) -> ModelConfig {
    let Sections { gpus, limits, controller } = *sections;
    let first_file_fault = context.file_faults.borrow().len();
    context.file_faults.borrow_mut().extend(source.missing.clone());
    let ModelGpu { index, is_auto } = fields.read("gpu", |value| gpu(value, gpus));
    let gpu = gpus.get(index);
    let (engine, inputs) = engine::engine(fields, source, gpu, limits, context);
    let version = source.version(name(fields));
    let profile = fields.get("profile").and_then(|value| Some((context.path(&value)?, value)));
    let read = profile.as_ref().and_then(|(path, value)| profile::load(value, path, context));
    let is_emulated = matches!(engine, EngineConfig::Emulated { .. });
    let slo = slo(fields);
    let (latency, percentile) = (units::show_duration(slo.latency), slo.percentile);
    fields.show("slo", format!("{{latency: {latency}, percentile: {percentile}}}"));
    let warmed = warmup::WarmupModel { engine: &engine, limits, inputs: &inputs };
    let warmup = warmup::warmup(fields, &warmed, context);
    if let Some(profile) = &read {
        note_hopeless(fields, &slo, profile, gpu, context);
        note_other_shapes(fields, &warmup, profile, context);
    }
    let model = ModelConfig {
        name: version.instance_name(),
        version,
        rollout: fields.optional("rollout", |value| Some(rollout::rollout(&value.fields(), None))),
        gpu: index,
        gpu_auto: is_auto,
        profile: read,
        profile_path: profile.map(|(path, _)| absolute(&path)),
        share: shares::share(fields, gpu),
        slo,
        batch: batch::batch(fields, is_emulated, &slo, context),
        queue: batch::queue(fields, limits),
        cache: fields.section("cache").optional("size", |value| value.size()),
        openai: openai::openai(fields),
        priority: priority(fields, gpu, controller, context),
        handover: fields.read("handover", |value| value.one_of(&HANDOVERS)),
        shared_worker: isolation::shared_worker(fields),
        sleep: sleep::sleep(fields),
        standby: fields.read("standby", |value| value.one_of(&STANDBYS)),
        cpus: fields.read("cpus", |value| Some(cpus(value, context))),
        memory_limit: memory_limit(fields, gpu, context),
        warmup,
        engine,
        broken: broken(context, first_file_fault),
    };
    isolation::check_shared(fields, &model);
    sleep::check_sleep(fields, &model);
    model
}

fn broken(context: &Context<'_>, first: usize) -> Option<String> {
    let faults = context.file_faults.borrow();
    let (fault, others) = faults[first..].split_first()?;
    let more = if others.is_empty() { String::new() } else { format!(" (and {} more)", others.len()) };
    Some(format!("{fault}{more}"))
}

const MAX_NAME: usize = 128;

/// Reads a model's name. If the name is missing, records a fault and returns an empty name.
pub(super) fn name(fields: &Fields<'_>) -> String {
    let given = fields.get("name");
    let Some(value) = given.clone().or_else(|| fields.get("path")) else {
        fields.fault("name", "missing; a model without a path needs a name, for example `name: echo`");
        return String::new();
    };
    let name = match given {
        Some(value) => value.text().map(str::to_owned),
        None => value.word().and_then(engine::stem),
    };
    let name = name.unwrap_or_default();
    if !is_model_name(&name) {
        value.fault(format!(
            "invalid model name `{name}`; give a `name` of at most {MAX_NAME} letters, digits, `.`, `_` and `-`"
        ));
    }
    fields.show("name", quoted(&name));
    name
}

/// Returns true if models and shared workers can have this name.
pub(super) fn is_model_name(name: &str) -> bool {
    let is_allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    name.len() <= MAX_NAME && name.bytes().all(is_allowed) && !matches!(name, "." | "..")
}

/// The GPU on which a model runs.
struct ModelGpu {
    /// The index, or 0 for `gpu: auto`.
    index: usize,
    is_auto: bool,
}

/// Reads the GPU of a model. If it is `auto` and the GPUs are of different kinds, records a fault,
/// because the model's other settings must be valid on each GPU.
fn gpu(value: &Value<'_>, gpus: &[GpuConfig]) -> Option<ModelGpu> {
    if value.word() == Some("auto") {
        let kind = |gpu: &GpuConfig| match gpu {
            GpuConfig::Emulated { .. } => None,
            GpuConfig::Cuda { partition, .. } => Some(*partition),
        };
        if gpus.windows(2).any(|pair| kind(&pair[0]) != kind(&pair[1])) {
            value.fault(
                "`auto` needs GPUs of one kind; make all of them emulated or give all the same `partition`",
            );
        }
        return Some(ModelGpu { index: 0, is_auto: true });
    }
    if let Some(advice) = value.similar_word(&["auto"]) {
        value.fault(advice);
        return None;
    }
    let index = value.whole()?;
    if index >= gpus.len() && !gpus.is_empty() {
        let last = gpus.len() - 1;
        value.fault(format!(
            "GPU {index} not found; use an index from 0 to {last}, the positions in the list `gpus`"
        ));
    }
    Some(ModelGpu { index, is_auto: false })
}

fn slo(fields: &Fields<'_>) -> SloTarget {
    let placeholder = SloTarget { latency: Duration::from_secs(1), next: None, percentile: 99.0 };
    let why = "give the time within which requests must be answered, for example `slo: 20ms`";
    let Some(value) = fields.required("slo", why) else { return placeholder };
    if value.is_scalar() {
        return SloTarget { latency: value.duration().unwrap_or(placeholder.latency), ..placeholder };
    }
    let keys = value.fields();
    match (keys.get("latency"), keys.get("first")) {
        (None, None) => {
            keys.required(
                "latency",
                "give the time within which requests must be answered, for example 20ms",
            );
        }
        (Some(_), Some(_)) => keys.forbid(&["first"], "`latency` is the same; give one of them"),
        _ => {}
    }
    slo_of(&keys, placeholder)
}

/// Returns `slo` with the values of these keys.
pub(super) fn slo_of(keys: &Fields<'_>, slo: SloTarget) -> SloTarget {
    let latency = keys.optional("latency", Value::duration);
    SloTarget {
        latency: latency.or(keys.optional("first", Value::duration)).unwrap_or(slo.latency),
        next: keys.optional("next", Value::duration).or(slo.next),
        percentile: keys.optional("percentile", Value::number).unwrap_or(slo.percentile),
    }
}

/// Adds a note if even the whole GPU is too slow for the SLO. In the worst case a request waits for
/// a batch of one row, and runs in the next batch. The note is not a fault, because the profile may
/// be wrong.
fn note_hopeless(
    fields: &Fields<'_>,
    slo: &SloTarget,
    profile: &Profile,
    gpu: Option<&GpuConfig>,
    context: &Context<'_>,
) {
    let whole = match gpu {
        Some(GpuConfig::Emulated { sms, .. }) => *sms,
        // The number of SMs of a real GPU is not known yet. The profile's largest number is used
        // instead, because the times do not change above this number.
        Some(GpuConfig::Cuda { .. }) | None => profile.execution.sms().last().copied().unwrap_or(Sms(1)),
    };
    let two_batches = 2 * profile.execution.time(1, f64::from(whole.0));
    if let Some(value) = fields.get("slo").filter(|_| two_batches > slo.latency) {
        let ms = two_batches.as_secs_f64() * 1e3;
        context.note(
            &value,
            format!(
                "the model cannot meet this SLO under load: by its profile, two batches of one row take {ms:.1} ms \
                 on the whole GPU; the policy will not change shares for it"
            ),
        );
    }
}

fn note_other_shapes(fields: &Fields<'_>, warmup: &WarmupConfig, profile: &Profile, context: &Context<'_>) {
    let Some(value) = fields.get("profile") else { return };
    for (input, measured) in &profile.shapes {
        let warmed = match warmup.inputs.get(input).and_then(WarmupInput::given_shape) {
            // The shape of an array also includes the batch axis.
            Some([_, shape @ ..]) if shape == measured => continue,
            Some(shape) if shape == measured => continue,
            Some(shape) => format!("has {shape:?}"),
            None => "gives none, so that free axes have the first length that works".to_owned(),
        };
        context.note(
            &value,
            format!(
                "the profile was measured with shape {measured:?} of input {input}, but `warmup` {warmed}; times may \
                 differ: measure with the shape of your requests, and give the same shape in `warmup`"
            ),
        );
    }
}

fn priority(
    fields: &Fields<'_>,
    gpu: Option<&GpuConfig>,
    controller: &ControllerConfig,
    context: &Context<'_>,
) -> u32 {
    let priority = fields.read("priority", |value| value.whole());
    // Under MPS, the priority always has an effect, because MPS itself schedules its clients by
    // priority.
    let has_effect = controller.policy.heeds_priorities()
        || matches!(gpu, Some(GpuConfig::Cuda { partition: Partitioning::Mps, .. }));
    if let Some(value) = fields.get("priority").filter(|_| priority != 1 && !has_effect) {
        context.note(&value, format!("this has no effect under `policy: {}`", controller.policy));
    }
    priority
}

fn cpus(value: &Value<'_>, context: &Context<'_>) -> Vec<usize> {
    let mut cpus = value.distinct(|item| {
        let cpu = item.whole()?;
        if let Some(cores) = context.host.as_ref().and_then(Host::cores)
            && !cores.iter().any(|range| range.contains(&cpu))
        {
            let cores: Vec<_> =
                cores.iter().map(|range| format!("{}-{}", range.start(), range.end())).collect();
            context.host_fault(item, format!("core {cpu} not found; use cores of {}", cores.join(", ")));
        }
        Some(cpu)
    });
    cpus.sort_unstable();
    cpus
}

fn memory_limit(fields: &Fields<'_>, gpu: Option<&GpuConfig>, context: &Context<'_>) -> Option<u64> {
    let memory = fields.section("memory");
    let value = memory.get("limit")?;
    match gpu {
        Some(GpuConfig::Emulated { .. }) => {
            context.note(&value, "this has no effect on an emulated GPU, which has no memory");
        }
        Some(GpuConfig::Cuda { partition: Partitioning::None, .. }) => {
            context.note(&value, "this has no effect under `partition: none`, because only MPS enforces it");
        }
        Some(GpuConfig::Cuda { partition: Partitioning::Mps, .. }) | None => {}
    }
    value.size()
}
