//! Writes the whole configuration as YAML, including all defaults. Loading this text gives the same
//! configuration.

use std::path::Path;

use serde_json::{Map, Value, json};
use shadowslice_shared::boot::{EchoTensor, ElementValue, InputValues};

use super::keys::{
    ACCESS, CONFIG, HANDOVERS, Key, KeyDefault, Kind, ON_LATE, PARTITIONS, PROVIDERS, STANDBYS,
};
use super::keys::{STARTS, Words};
use super::peers::{Account, AllowedClients, Peers};
use super::types::{
    Config, CudaDevice, EngineConfig, GpuConfig, Listener, ModelConfig, ReadyConfig, Tls, TracingConfig,
    WarmupConfig, WarmupInput, WarmupValues,
};
use super::units::{show_duration, show_sample, show_size};

/// The largest number of columns of a map that is written in one line.
const MAX_COLUMNS: usize = 100;

/// Returns the configuration as YAML. Paths are absolute, so that the text is valid in any folder.
pub fn render(config: &Config) -> String {
    let mut text = String::new();
    block(&mut text, 0, "", CONFIG.keys(), &values(config));
    text
}

/// Writes the keys of a map, one per line. A comment replaces each key without a value.
fn block(text: &mut String, indent: usize, path: &str, keys: &'static [Key], values: &Value) {
    let margin = " ".repeat(indent);
    for key in keys {
        let Key { name, kind, .. } = key;
        let value = &values[name];
        if value.is_null() {
            comment(text, &margin, path, key, values);
            continue;
        }
        let line = format!("{margin}{name}: {}", flow(kind, value));
        match (kind, value) {
            (Kind::List(Kind::Map(keys), ..), Value::Array(items)) if !items.is_empty() => {
                *text += &format!("{margin}{name}:\n");
                items.iter().for_each(|item| listed(text, indent + 2, keys, item));
            }
            (Kind::Map(keys), _) if line.len() > MAX_COLUMNS => {
                *text += &format!("{margin}{name}:\n");
                block(text, indent + 2, &format!("{path}{name}."), keys, value);
            }
            _ => {
                let keys = if value.is_object() { kind.keys() } else { &[] };
                let (unset, set): (Vec<_>, Vec<_>) = keys.iter().partition(|key| value[key.name].is_null());
                if keys.is_empty() || !set.is_empty() {
                    *text += &format!("{line}\n");
                }
                for key in unset {
                    comment(text, &margin, &format!("{path}{name}."), key, value);
                }
            }
        }
    }
}

/// Writes a list's item: in one line if it fits, otherwise one line per key.
fn listed(text: &mut String, indent: usize, keys: &'static [Key], item: &Value) {
    let line = format!("{}- {}\n", " ".repeat(indent), flow_map(keys, item));
    if line.len() <= MAX_COLUMNS {
        *text += &line;
        return;
    }
    let start = text.len();
    block(text, indent + 2, "", keys, item);
    text.replace_range(start + indent..=start + indent, "-");
}

fn comment(text: &mut String, margin: &str, path: &str, key: &Key, values: &Value) {
    let Key { name, default: KeyDefault::Unset(default), .. } = key else { return };
    let instead = values[format!("# {name}")].as_str().unwrap_or(default);
    if !instead.is_empty() {
        *text += &format!("{margin}# {path}{name}: not set; {instead}\n");
    }
}

/// Returns a value in one line.
fn flow(kind: &'static Kind, value: &Value) -> String {
    match value {
        Value::String(text) => match kind {
            Kind::Duration(..) | Kind::Size(..) | Kind::Share | Kind::Sample | Kind::Number(_) => {
                text.clone()
            }
            _ => quoted(text),
        },
        Value::Array(items) => {
            let items: Vec<_> = items.iter().map(|item| flow(kind.items().0, item)).collect();
            format!("[{}]", items.join(", "))
        }
        Value::Object(entries) if kind.keys().is_empty() => {
            let entry = |(name, value): (&String, &Value)| {
                format!("{}: {}", quoted(name), flow(kind.of_key(name), value))
            };
            format!("{{{}}}", entries.iter().map(entry).collect::<Vec<_>>().join(", "))
        }
        Value::Object(_) => flow_map(kind.keys(), value),
        other => other.to_string(),
    }
}

fn flow_map(keys: &'static [Key], value: &Value) -> String {
    let set = keys.iter().filter(|key| !value[key.name].is_null());
    let entries = set.map(|key| format!("{}: {}", key.name, flow(&key.kind, &value[key.name])));
    format!("{{{}}}", entries.collect::<Vec<_>>().join(", "))
}

/// Returns the value of each key. A key without a value is null. An entry `# KEY` replaces the
/// table's text on a key without a value.
pub(super) fn values(config: &Config) -> Value {
    let Config { listen, controller, limits, timeouts, workers, .. } = config;
    let listeners = |listeners: &[Listener]| {
        listeners.iter().map(|one| listener(one, &config.run_dir)).collect::<Value>()
    };
    json!({
        "run_dir": path(&config.run_dir),
        "listen": {
            "http": listeners(&listen.http),
            "grpc": listeners(&listen.grpc),
            "metrics": listeners(&listen.metrics),
        },
        "gpus": config.gpus.iter().map(gpu).collect::<Value>(),
        "models": config.models.iter().map(model).collect::<Value>(),
        "control": config.control.as_ref().map(peers),
        "model_control": access(&config.model_control, |all| json!(word(&ACCESS, all))),
        "controller": {
            "policy": controller.policy.to_string(),
            "interval": show_duration(controller.interval),
            "act": controller.act,
            "standby_memory": controller.standby_memory.map(show_size),
        },
        "limits": {
            "request_bytes": show_size(limits.request_bytes),
            "response_bytes": show_size(limits.response_bytes),
            "memory": limits.memory.map(show_size),
            "in_flight": limits.in_flight,
            "connections": limits.connections,
            "keep_alive": show_duration(limits.keep_alive),
            "shared_memory": access(&limits.shared_memory, |all| json!(all)),
        },
        "timeouts": {
            "spawn": show_duration(timeouts.spawn),
            "warm": show_duration(timeouts.warm),
            "drain": show_duration(timeouts.drain),
            "dwell": show_duration(timeouts.dwell),
            "stop": show_duration(timeouts.stop),
            "lame_duck": show_duration(config.lame_duck),
        },
        "start": word(&STARTS, config.strict_start),
        "ready": match &config.ready {
            ReadyConfig::All => json!("all"),
            ReadyConfig::Any => json!("any"),
            ReadyConfig::Each(names) => json!(names),
        },
        "onnxruntime": {"library": config.onnxruntime.library.as_deref().map(path)},
        "workers": {
            "environment": workers.environment,
            "users": workers.users.as_ref().map(|users| format!("{}-{}", users.start(), users.end())),
            "memory": workers.memory.map(show_size),
        },
        "tracing": config.tracing.as_ref().map(|TracingConfig { otlp, sample, service }| {
            json!({"otlp": otlp, "sample": show_sample(*sample), "service": service})
        }),
        "access_log": config.access_log.as_deref().map(path),
    })
}

fn listener(listener: &Listener, run_dir: &Path) -> Value {
    let value = match listener {
        Listener::Unix { path, mode, group, peers } => {
            let path = path.strip_prefix(run_dir).unwrap_or(path).display();
            let accounts = peers.as_ref().map(self::peers).unwrap_or_default();
            json!({
                "address": format!("unix:{path}"),
                "mode": mode.map(|mode| format!("{mode:04o}")),
                "group": group,
                "users": accounts["users"],
                "groups": accounts["groups"],
            })
        }
        Listener::Tcp { address, tls, tokens } => json!({
            "address": address.to_string(),
            "tls": tls.as_ref().map(|Tls { certificate, key, client_ca }| json!({
                "certificate": path(certificate),
                "key": path(key),
                "client_ca": client_ca.as_deref().map(path),
            })),
            "tokens": tokens.as_deref().map(path),
        }),
    };
    let is_plain =
        value.as_object().is_some_and(|keys| keys.values().filter(|key| !key.is_null()).count() == 1);
    if is_plain { value["address"].clone() } else { value }
}

fn peers(Peers { users, groups, clients }: &Peers) -> Value {
    let account = |account: &Account| match account {
        Account::Id(id) => json!(id),
        Account::Name(name) => json!(name),
    };
    let list = |accounts: &[Account]| accounts.iter().map(account).collect::<Value>();
    let clients = (!clients.is_empty()).then_some(clients);
    json!({"users": list(users), "groups": list(groups), "clients": clients})
}

fn access(access: &AllowedClients, plain: impl FnOnce(bool) -> Value) -> Value {
    match access {
        AllowedClients::Nobody => plain(false),
        AllowedClients::Everybody => plain(true),
        AllowedClients::Only(listed) => peers(listed),
    }
}

fn gpu(gpu: &GpuConfig) -> Value {
    match gpu {
        GpuConfig::Emulated { sms } => json!({"device": "emulated", "sms": sms.0}),
        GpuConfig::Cuda { device, partition } => {
            let device = match device {
                CudaDevice::Index(index) => json!(index),
                CudaDevice::Uuid(uuid) => json!(uuid),
            };
            json!({"device": device, "partition": word(&PARTITIONS, *partition)})
        }
    }
}

fn model(model: &ModelConfig) -> Value {
    let ModelConfig { share, slo, batch, queue, .. } = model;
    let mut value = json!({
        "name": model.name,
        "gpu": if model.gpu_auto { json!("auto") } else { json!(model.gpu) },
        "profile": model.profile_path.as_deref().map(path),
        // The initial share is only written if the configuration gives it, because a written initial
        // share prevents the policy from choosing another one.
        "share": {
            "initial": share.given.then(|| share.initial.to_string()),
            "# initial": format!("a policy chooses it, and without one it is {}", share.initial),
            "min": share.min.to_string(),
            "max": share.max.to_string(),
        },
        "slo": {"latency": show_duration(slo.latency), "percentile": slo.percentile.to_string()},
        "batch": {"max": batch.max, "sizes": batch.sizes, "max_delay": show_duration(batch.max_delay)},
        "queue": {
            "max_requests": queue.max_requests,
            "memory": show_size(queue.memory),
            "on_late": word(&ON_LATE, queue.on_late),
        },
        "priority": model.priority,
        "handover": word(&HANDOVERS, model.handover),
        "standby": word(&STANDBYS, model.standby),
        "cpus": model.cpus,
        "memory": {"limit": model.memory_limit.map(show_size)},
        "warmup": warmup(&model.warmup),
    });
    engine(&mut value, &model.engine);
    value
}

fn engine(model: &mut Value, engine: &EngineConfig) {
    match engine {
        EngineConfig::OnnxRuntime { path: file, threads, providers } => {
            model["engine"] = json!("onnxruntime");
            model["path"] = path(file);
            model["threads"] = json!(threads);
            if !providers.is_empty() {
                model["providers"] = providers.iter().map(|one| word(&PROVIDERS, *one)).collect();
            }
        }
        EngineConfig::Python { path: file, interpreter, threads } => {
            model["engine"] = json!("python");
            model["path"] = path(file);
            model["threads"] = json!(threads);
            model["python"] = json!({"executable": path(interpreter)});
        }
        EngineConfig::Emulated { tensors } => {
            let tensor = |EchoTensor { input, output }: &EchoTensor| {
                let (datatype, shape) = (input.datatype.name(), &input.shape);
                json!({"input": input.name, "output": output, "datatype": datatype, "shape": shape})
            };
            model["engine"] = json!("emulated");
            model["tensors"] = tensors.iter().map(tensor).collect();
        }
    }
}

fn warmup(WarmupConfig { file, inputs }: &WarmupConfig) -> Value {
    let inputs = || inputs.iter().map(|(name, given)| (name.clone(), input(given))).collect::<Map<_, _>>();
    file.as_deref().map_or_else(|| json!(inputs()), path)
}

fn input(WarmupInput { shape, values }: &WarmupInput) -> Value {
    let element = |value: &ElementValue| match value {
        ElementValue::Whole(whole) => json!(whole),
        ElementValue::Number(number) => json!(number),
        ElementValue::Text(text) => json!(text),
    };
    let mut value = json!({"shape": shape});
    match values {
        Some(WarmupValues::Written(InputValues::Listed(listed))) => {
            value["values"] = listed.iter().map(element).collect();
        }
        Some(WarmupValues::Written(InputValues::Range { from, to })) => value["range"] = json!([from, to]),
        Some(WarmupValues::File(file)) => value["file"] = path(&file.path),
        // The configuration has no rows, because arrays are converted to rows only after the model
        // has been loaded.
        Some(WarmupValues::Written(InputValues::Rows(_))) | None => {}
    }
    value
}

fn word<T: Copy + PartialEq, const N: usize>(words: &Words<T, N>, value: T) -> &'static str {
    let word = words.iter().find(|(_, known)| *known == value).map(|(word, _)| *word);
    word.expect("the table has a word for each value")
}

fn path(path: &Path) -> Value {
    json!(path.to_string_lossy())
}

/// Returns the text. Adds quotes if YAML could read the text as another type.
fn quoted(text: &str) -> String {
    let is_plain_char = |c: char| c.is_ascii_alphanumeric() || matches!(c, '/' | '_' | '.' | '-');
    let starts_plain = text.starts_with(|c: char| c.is_ascii_alphabetic() || c == '/');
    let is_word_of_yaml = ["true", "false", "null", "yes", "no", "on", "off", "y", "n"];
    if starts_plain
        && text.chars().all(is_plain_char)
        && !is_word_of_yaml.iter().any(|word| text.eq_ignore_ascii_case(word))
    {
        return text.to_owned();
    }
    json!(text).to_string()
}
