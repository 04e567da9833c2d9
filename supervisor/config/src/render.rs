//! Writes the whole configuration as YAML, including all defaults. Loading this text gives the same
//! configuration.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use shadowslice_shared::boot::{ElementValue, InputValues};

use super::peers::AllowedClients;
use super::types::{
    BatchConfig, Config, CudaDevice, EngineConfig, GpuConfig, HandoverMode, LimitsConfig, Listener,
    ModelConfig, OnLate, Partitioning, ProviderKind, QueueConfig, ReadyConfig, ShareConfig, Timeouts, Tls,
    TracingConfig, WarmupInput, WarmupValues,
};
use super::units::{show_duration, show_sample, show_size};

/// Returns the configuration as YAML. Paths are absolute, so that the text is valid in any folder.
pub fn render(config: &Config) -> String {
    Document(config).to_string()
}

struct Document<'a>(&'a Config);

impl fmt::Display for Document<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let config = self.0;
        writeln!(f, "run_dir: {}", path(&config.run_dir))?;
        writeln!(f, "listen:")?;
        let listen = &config.listen;
        for (key, listeners) in [("http", &listen.http), ("grpc", &listen.grpc), ("metrics", &listen.metrics)]
        {
            let shown: Vec<_> = listeners.iter().map(|one| listener(one, &config.run_dir)).collect();
            writeln!(f, "  {key}: [{}]", shown.join(", "))?;
        }
        writeln!(f, "gpus:")?;
        config.gpus.iter().try_for_each(|one| writeln!(f, "  - {}", gpu(one)))?;
        writeln!(f, "models:")?;
        config.models.iter().try_for_each(|one| model(f, one))?;
        match &config.control {
            Some(peers) => writeln!(f, "control: {{{peers}}}")?,
            None => writeln!(f, "# control: not set; only root and this user may send commands")?,
        }
        writeln!(f, "model_control: {}", access(&config.model_control, ["none", "explicit"]))?;
        let policy = config.controller.policy;
        let interval = show_duration(config.controller.interval);
        let standby_memory = config.controller.standby_memory.map(show_size);
        let standby_memory =
            standby_memory.map(|size| format!(", standby_memory: {size}")).unwrap_or_default();
        writeln!(
            f,
            "controller: {{policy: {policy}, interval: {interval}, act: {}{standby_memory}}}",
            config.controller.act
        )?;
        if config.controller.standby_memory.is_none() {
            writeln!(f, "# controller.standby_memory: not set; half of a real GPU's memory")?;
        }
        limits(f, &config.limits)?;
        timeouts(f, &config.timeouts, config.lame_duck)?;
        writeln!(f, "start: {}", if config.strict_start { "strict" } else { "lenient" })?;
        writeln!(f, "ready: {}", ready(&config.ready))?;
        match &config.onnxruntime.library {
            Some(library) => writeln!(f, "onnxruntime: {{library: {}}}", path(library))?,
            None => writeln!(
                f,
                "# onnxruntime.library: not set; the supervisor searches for it when a model needs it"
            )?,
        }
        let names: Vec<_> = config.workers.environment.iter().map(|name| quoted(name)).collect();
        let users = config.workers.users.as_ref();
        let users =
            users.map(|users| format!(", users: {}-{}", users.start(), users.end())).unwrap_or_default();
        let memory = config.workers.memory.map(|memory| format!(", memory: {}", show_size(memory)));
        let memory = memory.unwrap_or_default();
        writeln!(f, "workers: {{environment: [{}]{users}{memory}}}", names.join(", "))?;
        match &config.tracing {
            Some(TracingConfig { otlp, sample, service }) => {
                let (otlp, sample, service) = (quoted(otlp), show_sample(*sample), quoted(service));
                writeln!(f, "tracing: {{otlp: {otlp}, sample: {sample}, service: {service}}}")?;
            }
            None => writeln!(f, "# tracing: not set; no request is traced")?,
        }
        match &config.access_log {
            Some(file) => writeln!(f, "access_log: {}", path(file)),
            None => writeln!(f, "# access_log: not set; answers are not logged"),
        }
    }
}

fn listener(listener: &Listener, run_dir: &Path) -> String {
    let (address, more) = match listener {
        Listener::Unix { path, mode, group, peers } => {
            let path = path.strip_prefix(run_dir).unwrap_or(path).display();
            let mode = mode.map(|mode| format!(", mode: \"{mode:04o}\"")).unwrap_or_default();
            let group = group.as_ref().map(|group| format!(", group: {}", quoted(group))).unwrap_or_default();
            let peers = peers.as_ref().map(|peers| format!(", {peers}")).unwrap_or_default();
            (quoted(&format!("unix:{path}")), format!("{mode}{group}{peers}"))
        }
        Listener::Tcp { address, tls, tokens } => {
            let tls = tls.as_ref().map(|tls| format!(", tls: {}", encryption(tls))).unwrap_or_default();
            let tokens =
                tokens.as_ref().map(|tokens| format!(", tokens: {}", path(tokens))).unwrap_or_default();
            (quoted(&address.to_string()), format!("{tls}{tokens}"))
        }
    };
    if more.is_empty() { address } else { format!("{{address: {address}{more}}}") }
}

fn encryption(tls: &Tls) -> String {
    let clients =
        tls.client_ca.as_ref().map(|file| format!(", client_ca: {}", path(file))).unwrap_or_default();
    format!("{{certificate: {}, key: {}{clients}}}", path(&tls.certificate), path(&tls.key))
}

fn gpu(gpu: &GpuConfig) -> String {
    match gpu {
        GpuConfig::Emulated { sms } => format!("{{device: emulated, sms: {}}}", sms.0),
        GpuConfig::Cuda { device, partition } => {
            let device = match device {
                CudaDevice::Index(index) => index.to_string(),
                CudaDevice::Uuid(uuid) => quoted(uuid),
            };
            let partition = match partition {
                Partitioning::Mps => "mps",
                Partitioning::None => "none",
            };
            format!("{{device: {device}, partition: {partition}}}")
        }
    }
}

fn model(f: &mut fmt::Formatter<'_>, model: &ModelConfig) -> fmt::Result {
    writeln!(f, "  - name: {}", quoted(&model.name))?;
    engine(f, &model.engine)?;
    match model.gpu_auto {
        true => writeln!(f, "    gpu: auto")?,
        false => writeln!(f, "    gpu: {}", model.gpu)?,
    }
    match &model.profile_path {
        Some(profile) => writeln!(f, "    profile: {}", path(profile))?,
        None => writeln!(f, "    # profile: none")?,
    }
    let ShareConfig { initial, given, min, max } = model.share;
    // The initial share is only written if the configuration gives it, because a written initial
    // share prevents the policy from choosing another one.
    let written = if given { format!("initial: {initial}, ") } else { String::new() };
    writeln!(f, "    share: {{{written}min: {min}, max: {max}}}")?;
    if !given {
        writeln!(f, "    # share.initial: not set; a policy chooses it, and without one it is {initial}")?;
    }
    let latency = show_duration(model.slo.latency);
    writeln!(f, "    slo: {{latency: {latency}, percentile: {}}}", model.slo.percentile)?;
    batch(f, &model.batch)?;
    queue(f, model.queue)?;
    writeln!(f, "    priority: {}", model.priority)?;
    let handover = match model.handover {
        HandoverMode::Auto => "auto",
        HandoverMode::InProcess => "in-process",
        HandoverMode::Shadow => "shadow",
        HandoverMode::Never => "never",
    };
    writeln!(f, "    handover: {handover}")?;
    // YAML 1.1 reads `off` without quotes as false.
    writeln!(f, "    standby: {}", quoted(if model.standby { "always" } else { "off" }))?;
    writeln!(f, "    cpus: {:?}", model.cpus)?;
    match model.memory_limit {
        Some(limit) => writeln!(f, "    memory: {{limit: {}}}", show_size(limit))?,
        None => writeln!(f, "    # memory.limit: none")?,
    }
    if let Some(file) = &model.warmup.file {
        return writeln!(f, "    warmup: {}", path(file));
    }
    let inputs = model.warmup.inputs.iter();
    let inputs: Vec<_> =
        inputs.map(|(input, given)| format!("{}: {}", quoted(input), warmup_input(given))).collect();
    writeln!(f, "    warmup: {{{}}}", inputs.join(", "))
}

fn warmup_input(WarmupInput { shape, values }: &WarmupInput) -> String {
    let element = |value: &ElementValue| match value {
        ElementValue::Whole(whole) => whole.to_string(),
        ElementValue::Number(number) => format!("{number:?}"),
        ElementValue::Text(text) => quoted(text).to_string(),
    };
    let shape = shape.as_ref().map(|shape| format!("shape: {shape:?}"));
    let values = values.as_ref().map(|values| match values {
        WarmupValues::Written(InputValues::Listed(listed)) => {
            format!("values: [{}]", listed.iter().map(element).collect::<Vec<_>>().join(", "))
        }
        WarmupValues::Written(InputValues::Range { from, to }) => format!("range: [{from:?}, {to:?}]"),
        // The configuration has no rows, because arrays are converted to rows only after the model
        // has been loaded.
        WarmupValues::Written(InputValues::Rows(_)) => String::new(),
        WarmupValues::File(file) => format!("file: {}", path(&file.path)),
    });
    format!("{{{}}}", [shape, values].into_iter().flatten().collect::<Vec<_>>().join(", "))
}

fn engine(f: &mut fmt::Formatter<'_>, engine: &EngineConfig) -> fmt::Result {
    match engine {
        EngineConfig::OnnxRuntime { path: file, threads, providers } => {
            writeln!(f, "    engine: onnxruntime")?;
            writeln!(f, "    path: {}", path(file))?;
            writeln!(f, "    threads: {threads}")?;
            let named = |provider: &ProviderKind| match provider {
                ProviderKind::Cuda => "cuda",
                ProviderKind::TensorRt => "tensorrt",
            };
            match &providers[..] {
                [] => Ok(()),
                providers => {
                    let names: Vec<_> = providers.iter().map(named).collect();
                    writeln!(f, "    providers: [{}]", names.join(", "))
                }
            }
        }
        EngineConfig::Python { path: file, interpreter, threads } => {
            writeln!(f, "    engine: python")?;
            writeln!(f, "    path: {}", path(file))?;
            writeln!(f, "    python: {{executable: {}}}", path(interpreter))?;
            writeln!(f, "    threads: {threads}")
        }
        EngineConfig::Emulated { tensors } => {
            writeln!(f, "    engine: emulated")?;
            writeln!(f, "    tensors:")?;
            tensors.iter().try_for_each(|tensor| {
                let (input, output) = (quoted(&tensor.input.name), quoted(&tensor.output));
                let (datatype, shape) = (tensor.input.datatype, &tensor.input.shape);
                writeln!(
                    f,
                    "      - {{input: {input}, output: {output}, datatype: {datatype}, shape: {shape:?}}}"
                )
            })
        }
    }
}

fn batch(f: &mut fmt::Formatter<'_>, batch: &BatchConfig) -> fmt::Result {
    let delay = show_duration(batch.max_delay);
    match (batch.max, &batch.sizes) {
        (Some(max), Some(sizes)) => {
            writeln!(f, "    batch: {{max: {max}, sizes: {sizes:?}, max_delay: {delay}}}")
        }
        (Some(max), None) => writeln!(f, "    batch: {{max: {max}, max_delay: {delay}}}"),
        (None, _) => {
            writeln!(
                f,
                "    # batch.max: {} if the model has a batch axis, otherwise 0",
                BatchConfig::DEFAULT_MAX
            )?;
            writeln!(f, "    batch: {{max_delay: {delay}}}")
        }
    }
}

fn queue(f: &mut fmt::Formatter<'_>, queue: QueueConfig) -> fmt::Result {
    let on_late = match queue.on_late {
        OnLate::Reject => "reject",
        OnLate::Serve => "serve",
    };
    let (requests, memory) = (queue.max_requests, show_size(queue.memory));
    writeln!(f, "    queue: {{max_requests: {requests}, memory: {memory}, on_late: {on_late}}}")
}

fn limits(f: &mut fmt::Formatter<'_>, limits: &LimitsConfig) -> fmt::Result {
    writeln!(f, "limits:")?;
    writeln!(f, "  request_bytes: {}", show_size(limits.request_bytes))?;
    writeln!(f, "  response_bytes: {}", show_size(limits.response_bytes))?;
    if let Some(memory) = limits.memory {
        writeln!(f, "  memory: {}", show_size(memory))?;
    }
    writeln!(f, "  in_flight: {}", limits.in_flight)?;
    writeln!(f, "  connections: {}", limits.connections)?;
    writeln!(f, "  keep_alive: {}", show_duration(limits.keep_alive))?;
    writeln!(f, "  shared_memory: {}", access(&limits.shared_memory, ["false", "true"]))
}

fn access(access: &AllowedClients, [nobody, everybody]: [&str; 2]) -> String {
    match access {
        AllowedClients::Nobody => nobody.to_owned(),
        AllowedClients::Everybody => everybody.to_owned(),
        AllowedClients::Only(peers) => format!("{{{peers}}}"),
    }
}

fn ready(ready: &ReadyConfig) -> String {
    match ready {
        ReadyConfig::All => "all".to_owned(),
        ReadyConfig::Any => "any".to_owned(),
        ReadyConfig::Each(names) => {
            format!("[{}]", names.iter().map(|name| quoted(name)).collect::<Vec<_>>().join(", "))
        }
    }
}

fn timeouts(f: &mut fmt::Formatter<'_>, timeouts: &Timeouts, lame_duck: Duration) -> fmt::Result {
    let Timeouts { spawn, warm, drain, dwell, stop } = *timeouts;
    let [spawn, warm, drain, dwell, stop] = [spawn, warm, drain, dwell, stop].map(show_duration);
    let lame_duck = show_duration(lame_duck);
    writeln!(
        f,
        "timeouts: {{spawn: {spawn}, warm: {warm}, drain: {drain}, dwell: {dwell}, stop: {stop}, lame_duck: {lame_duck}}}"
    )
}

fn path(path: &Path) -> String {
    quoted(&path.to_string_lossy())
}

/// Returns the text. Adds quotes if YAML could read the text as another type.
pub(super) fn quoted(text: &str) -> String {
    let is_plain_char = |c: char| c.is_ascii_alphanumeric() || matches!(c, '/' | '_' | '.' | '-');
    let starts_plain = text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '/');
    let is_word_of_yaml = ["true", "false", "null", "yes", "no", "on", "off", "y", "n"];
    if starts_plain
        && text.chars().all(is_plain_char)
        && !is_word_of_yaml.iter().any(|word| text.eq_ignore_ascii_case(word))
    {
        return text.to_owned();
    }
    serde_json::Value::from(text).to_string()
}
