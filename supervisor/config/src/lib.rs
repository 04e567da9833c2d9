//! The configuration: YAML, read into a tree of values that know where they stand, then checked.
//! All faults are found at once, each with its place.

mod arrays;
mod batch;
mod bounds;
mod changed;
pub mod check;
mod engine;
mod faults;
mod gpus;
mod host;
mod listen;
mod models;
mod onnx;
mod peers;
pub mod profile;
mod reader;
mod render;
mod settings;
mod shares;
mod terms;
mod tracing;
mod types;
mod units;
mod warmup;
mod yaml;

use std::cell::RefCell;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::path::{Component, Path, PathBuf};

pub use arrays::{ArrayFile, ArrayMismatch, MAX_BYTES as MAX_ARRAY_BYTES};
pub use changed::changed_model;
pub use engine::model_files;
pub use faults::{ConfigError, ConfigFault, FaultList, Position};
pub use host::RunDirCheck;
pub use peers::{Account, AllowedClients, Peers};
pub use render::render;
pub use settings::{CONTROL_SOCKET, PRIVATE};
pub use types::*;
pub use units::duration;

use faults::FaultLog;
use host::{AnyHost, HostLookup, ThisHost};
use reader::Value;

/// How variables of the environment are looked up.
pub type Environment<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// The surroundings of a configuration, and the notes that are found beside its faults.
struct Context<'a> {
    /// As the user named it.
    dir: &'a Path,
    env: Environment<'a>,
    is_root: bool,
    host: &'a dyn HostLookup,
    file_faults: RefCell<Vec<ConfigFault>>,
    host_faults: RefCell<Vec<ConfigFault>>,
    /// Settings that have no effect, or cannot be right, and are no faults.
    notes: RefCell<Vec<ConfigFault>>,
}

impl Context<'_> {
    /// Of a path that is relative to the file.
    fn shown(&self, path: &str) -> PathBuf {
        self.dir.join(path)
    }

    /// Notes a fault of a model's own files.
    fn file_fault(&self, value: &Value<'_>, message: impl Into<String>) {
        self.file_faults.borrow_mut().push(value.describe(message));
    }

    /// What the configuration names and this host does not have.
    fn lacks(&self, value: &Value<'_>, message: impl std::fmt::Display) {
        self.host_faults.borrow_mut().push(value.describe(format!("on this host {message}")));
    }

    /// A note on a profile that two models have is kept once.
    fn note(&self, value: &Value<'_>, message: impl Into<String>) {
        let (note, mut notes) = (value.describe(message), self.notes.borrow_mut());
        if !notes.contains(&note) {
            notes.push(note);
        }
    }
}

/// Without `..`, except where that leads elsewhere: out of a folder that is a link.
fn absolute(path: &Path) -> PathBuf {
    // Fails only where there is no working directory; opening the path fails by itself then.
    let whole = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let is_folder = |path: &Path| path.symlink_metadata().is_ok_and(|found| found.is_dir());
    let mut plain = PathBuf::new();
    for part in whole.components() {
        if part != Component::ParentDir || !is_folder(&plain) || !plain.pop() {
            plain.push(part);
        }
    }
    plain
}

/// Fails for a path that is not a regular file, is empty, or cannot be read by this user.
fn usable(path: &Path) -> Result<(), io::Error> {
    let metadata = fs::metadata(path)?;
    let kind = metadata.file_type();
    if kind.is_dir() {
        return Err(io::Error::other("it is a directory"));
    }
    if !kind.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    File::open(path)?;
    if metadata.len() == 0 {
        return Err(io::Error::other("it is empty"));
    }
    Ok(())
}

/// On a host that has whatever is named; see [`load_here`].
pub fn load(path: &Path, env: Environment<'_>, is_root: bool) -> Result<Config, ConfigError> {
    load_on(path, env, is_root, &AnyHost)
}

fn load_on(
    path: &Path,
    env: Environment<'_>,
    is_root: bool,
    host: &dyn HostLookup,
) -> Result<Config, ConfigError> {
    let log = FaultLog::new(path);
    let text =
        yaml::read(path, &log).map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
    let Some(tree) = text.and_then(|text| yaml::parse(&text, EXAMPLE, &log)) else {
        return Err(ConfigError::Faults(log.into_sorted()));
    };
    let dir = path.parent().unwrap_or(Path::new(""));
    let context = Context {
        dir,
        env,
        is_root,
        host,
        file_faults: RefCell::default(),
        host_faults: RefCell::default(),
        notes: RefCell::default(),
    };
    let config = document(&Value::root(&tree, &log), &context);
    let mut faults = log.into_sorted();
    if faults.is_empty() {
        return Ok(config);
    }
    faults.extend(config.file_faults);
    faults.extend(config.host_faults);
    Err(ConfigError::Faults(faults))
}

/// In the environment of this process. Faults of models' own files, and what this host lacks, leave
/// a configuration, and stand in [`Config::file_faults`] and [`Config::host_faults`].
pub fn load_here(path: &Path) -> Result<Config, ConfigError> {
    examined_here(path, &|_| None)
}

/// [`load_here`], with the run directory's fault among those of the host.
fn examined_here(path: &Path, run_dir: RunDirCheck<'_>) -> Result<Config, ConfigError> {
    let is_root = nix::unistd::geteuid().is_root();
    load_on(path, &|name| std::env::var_os(name), is_root, &ThisHost::new(run_dir))
}

const EXAMPLE: &str = "models: [{path: digits.onnx, slo: 20ms}]";

/// In the environment of this process.
pub fn default_run_dir() -> Option<PathBuf> {
    settings::default_run_dir(&|name| std::env::var_os(name), nix::unistd::geteuid().is_root())
}

const KEYS: &[&str] = &[
    "run_dir",
    "listen",
    "gpus",
    "models",
    "control",
    "model_control",
    "controller",
    "limits",
    "timeouts",
    "start",
    "ready",
    "onnxruntime",
    "workers",
    "tracing",
    "access_log",
];

/// Where there are faults, defaults stand in.
fn document(root: &Value<'_>, context: &Context<'_>) -> Config {
    let fields = root.fields(KEYS);
    let run_dir = settings::run_dir(&fields, context);
    let listen = listen::listen(&fields, &run_dir, context);
    let gpus = gpus::gpus(&fields);
    let limits = settings::limits(&fields, context);
    let controller = settings::controller(&fields, context);
    let sections = models::Sections { gpus: &gpus, limits: &limits, controller: &controller };
    let models = models::models(&fields, &sections, context);
    let (timeouts, lame_duck) = settings::timeouts(&fields);
    let ready = fields.or("ready", ReadyConfig::default(), |value| settings::ready(value, &models));
    let workers = settings::workers(&fields, models.len());
    let control = fields.get("control").and_then(|value| peers::listed(&value, context));
    let model_control = settings::model_control(&fields, context);
    let access_log = settings::access_log(&fields, context);
    let mut host_faults = context.host_faults.take();
    host_faults.sort_by_key(|fault| fault.at);
    Config {
        run_dir,
        listen,
        gpus,
        models,
        control,
        model_control,
        controller,
        limits,
        timeouts,
        lame_duck,
        strict_start: fields
            .or("start", false, |value| value.one_of(&[("lenient", false), ("strict", true)])),
        ready,
        onnxruntime: settings::onnxruntime(&fields, context),
        workers,
        tracing: tracing::tracing(&fields),
        access_log,
        file_faults: context.file_faults.take(),
        host_faults,
        notes: context.notes.take(),
    }
}
