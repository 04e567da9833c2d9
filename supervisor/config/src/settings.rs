//! Reads the settings of the whole supervisor: run directory, controller, limits, timeouts and
//! workers.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::listen::MAX_SOCKET_PATH;
use super::peers;
use super::reader::{Fields, Value};
use super::render::quoted;
use shadowslice_policy::sharing::PolicyName;

use super::types::{
    Choice, ControllerConfig, LimitsConfig, ModelConfig, ReadyConfig, Timeouts, WorkersConfig,
};
use super::{Context, Environment, absolute};

/// The name of the control socket in the run directory, for commands such as `status` and `resize`.
pub const CONTROL_SOCKET: &str = "control.sock";

/// The name of a folder in the run directory that other users cannot open.
pub const PRIVATE: &str = "private";

/// Reads the run directory and returns its absolute path. Records a fault if the path is too long
/// for Unix sockets.
pub(super) fn run_dir(root: &Fields<'_>, context: &Context<'_>) -> PathBuf {
    let written = root.get("run_dir");
    let run_dir = match &written {
        Some(value) => context.path(value).unwrap_or_default(),
        None => default_run_dir(context.env, context.is_root).unwrap_or_else(|| {
            root.fault("run_dir", "missing, and neither RUNTIME_DIRECTORY nor XDG_RUNTIME_DIR is set; give a folder for sockets, for example `run_dir: /tmp/shadowslice`");
            PathBuf::new()
        }),
    };
    let run_dir = absolute(&run_dir);
    root.show("run_dir", quoted(&run_dir.to_string_lossy()));
    let socket = run_dir.join(CONTROL_SOCKET);
    let length = socket.as_os_str().len();
    if length > MAX_SOCKET_PATH {
        root.fault(
            "run_dir",
            format!(
                "the path is too long for Unix sockets: {} has {length} bytes, and at most {MAX_SOCKET_PATH} fit; \
                 shorten the path by {}",
                socket.display(),
                length - MAX_SOCKET_PATH
            ),
        );
    }
    // The default run directory is not checked. It depends on the environment, which may differ
    // when the supervisor runs.
    if let (Some(value), Some(host)) = (written, &context.host)
        && let Some(why) = (host.refuses_run_dir)(&run_dir)
    {
        context.host_fault(&value, why);
    }
    run_dir
}

pub(super) fn default_run_dir(env: Environment<'_>, is_root: bool) -> Option<PathBuf> {
    let variable = |name| env(name).filter(|value| !value.is_empty());
    if let Some(directories) = variable("RUNTIME_DIRECTORY") {
        // systemd separates multiple directories with colons.
        return std::env::split_paths(&directories).next();
    }
    if is_root {
        return Some(PathBuf::from("/run/shadowslice"));
    }
    Some(Path::new(&variable("XDG_RUNTIME_DIR")?).join("shadowslice"))
}

pub(super) fn controller(root: &Fields<'_>, context: &Context<'_>) -> ControllerConfig {
    let fields = root.section("controller");
    let policy = fields.read("policy", |value| {
        let similar = value.similar_word(&PolicyName::ALL.map(PolicyName::name));
        value.parsed(|text| {
            if text.ends_with(Choice::FORMER_SUFFIX) {
                context.note(value, "`+doors` is now `+admission`; the next release refuses the old suffix");
            }
            text.parse::<Choice>().map_err(|error| similar.unwrap_or_else(|| error.to_string()))
        })
    });
    let interval = fields.read("interval", |value| value.duration());
    let act = fields.read("act", |value| value.flag());
    let preempt = fields.read("preempt", |value| value.flag());
    let standby_memory = fields.optional("standby_memory", Value::size);
    let controller = ControllerConfig { policy, interval, act, preempt, standby_memory };
    let default = fields.default("interval", |value| value.duration());
    for (key, is_default) in [("interval", interval == default), ("act", act), ("preempt", preempt)] {
        if let (Some(value), false, None) = (fields.get(key), is_default, controller.deciding_policy()) {
            context.note(&value, "this has no effect under `policy: static`");
        }
    }
    controller
}

pub(super) fn limits(root: &Fields<'_>, context: &Context<'_>) -> LimitsConfig {
    let fields = root.section("limits");
    let request_bytes = fields.read("request_bytes", |value| value.size());
    let response_bytes = fields.read("response_bytes", |value| value.size());
    let least = LimitsConfig::least_memory(request_bytes, response_bytes);
    LimitsConfig {
        request_bytes,
        response_bytes,
        memory: fields.optional("memory", |value| value.size_from(least)),
        in_flight: fields.read("in_flight", |value| value.whole()),
        connections: fields.read("connections", |value| value.whole()),
        keep_alive: fields.read("keep_alive", |value| value.duration()),
        shared_memory: fields
            .read("shared_memory", |value| peers::access(value, context, |word| word.flag())),
    }
}

/// Reads the time limits of workers, and the time for which a stopping host continues to serve.
pub(super) fn timeouts(root: &Fields<'_>) -> (Timeouts, Duration) {
    let fields = root.section("timeouts");
    let time = |key| fields.read(key, |value| value.duration());
    let timeouts = Timeouts {
        spawn: time("spawn"),
        warm: time("warm"),
        drain: time("drain"),
        dwell: time("dwell"),
        stop: time("stop"),
    };
    (timeouts, time("lame_duck"))
}

pub(super) fn ready(value: &Value<'_>, models: &[ModelConfig]) -> Option<ReadyConfig> {
    if !value.is_list() {
        let found = match value.word() {
            Some("any") => Some(ReadyConfig::Any),
            Some("all") => Some(ReadyConfig::All),
            _ => None,
        };
        if found.is_none() {
            value.fault("must be `any`, `all` or a list of model names, for example [bert, resnet]");
        }
        return found;
    }
    let known = |name: &Value<'_>| {
        let text = name.text()?;
        let known = models.iter().any(|model| model.served_name() == text);
        if !known {
            name.fault(format!("model `{text}` not found; use the name of a model"));
        }
        known.then(|| text.to_owned())
    };
    let mut names: Vec<_> = value.items().iter().filter_map(known).collect();
    names.sort_unstable();
    Some(ReadyConfig::Each(names))
}

/// Reads the path of the access log. The file's folder must exist, because the supervisor creates
/// the file but not the folder.
pub(super) fn access_log(value: &Value<'_>, context: &Context<'_>) -> Option<PathBuf> {
    let path = absolute(&context.path(value)?);
    if let Some(why) = context.host.as_ref().and_then(|host| host.refuses_log(&path)) {
        context.host_fault(value, why);
    }
    Some(path)
}

pub(super) fn workers(root: &Fields<'_>, models: usize) -> WorkersConfig {
    let fields = root.section("workers");
    let names = |value: &Value<'_>| {
        let name = |item: &Value<'_>| {
            let name = item.text()?;
            let is_allowed = !name.contains('=') && !name.starts_with("CUDA_MPS_");
            if !is_allowed {
                item.fault("workers cannot inherit this variable; name one, for example `HTTPS_PROXY`");
            }
            Some(name.to_owned())
        };
        value.items().iter().map(name).collect()
    };
    let mut environment: Vec<String> = fields.read("environment", names);
    environment.sort_unstable();
    let users = fields.optional("users", |value| value.parsed(users));
    if let (Some(users), Some(value)) = (&users, fields.get("users"))
        && users.clone().count() < models
    {
        value.fault(format!("fewer users than the {models} models; give one user for each model"));
    }
    let memory = fields.optional("memory", Value::size);
    let host_memory = fields.optional("host_memory", Value::size);
    WorkersConfig { environment, users, memory, host_memory }
}

/// Parses a range of user ids, `FIRST-LAST`. Rejects a range that includes root.
fn users(text: &str) -> Result<RangeInclusive<u32>, String> {
    let range = text.split_once('-').and_then(|(first, last)| {
        let (first, last): (u32, u32) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        (0 < first && first <= last && last < u32::MAX).then_some(first..=last)
    });
    range.ok_or_else(|| format!("invalid range of user ids `{text}`; use for example `61000-61063`"))
}
