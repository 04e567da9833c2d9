//! Loads and checks the configuration. A YAML file is parsed into a tree of values with their
//! positions, and then checked. A check reports all faults together, each with its position and
//! key.

#![warn(missing_docs)]

mod arrays;
mod batch;
pub mod check;
mod client_changes;
mod engine;
mod faults;
mod gpus;
mod host;
mod isolation;
mod keys;
mod listen;
mod model_spec;
mod models;
mod onnx;
mod openai;
mod peers;
pub mod profile;
mod read_again;
mod reader;
mod render;
mod rollout;
mod settings;
mod shares;
mod sleep;
mod tenants;
mod tracing;
mod types;
mod units;
mod versions;
mod warmup;
mod warmup_fit;
mod yaml;

use std::cell::RefCell;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

pub use arrays::{ArrayFile, MAX_BYTES as MAX_ARRAY_BYTES};
pub use client_changes::apply_client_changes;
pub use engine::model_files;
pub use faults::{ConfigError, ConfigFault, FaultList, Position};
pub use host::RunDirCheck;
pub use isolation::{MAX_MEMBERS, MPS_CLIENTS, MpsClients};
pub use keys::schema;
pub use peers::{Account, AllowedClients, Peers};
pub use read_again::version_of;
pub use render::{Document, render};
pub use rollout::rollout_with;
pub use settings::{CONTROL_SOCKET, PRIVATE};
pub use tenants::{DEFAULT_TENANT, RequestRate, TenantConfig, TenantHeader, TenantsConfig};
pub use types::*;
pub use units::duration;
pub use versions::{FoundVersion, find_versions};
pub use warmup_fit::{check_values, shape_fits};

use faults::{FaultLog, unique};
use host::Host;
use keys::{ACCESS, CONFIG, STARTS};
use reader::Value;
use render::quoted;
use yaml::YamlNode;

/// A function that looks up an environment variable.
pub type Environment<'a> = &'a dyn Fn(&str) -> Option<OsString>;

/// The environment in which a configuration is read, and the recorded faults and notes that do not
/// prevent loading.
struct Context<'a> {
    /// The configuration file, as the user wrote its path. Paths in it are relative to its folder.
    file: &'a Path,
    env: Environment<'a>,
    is_root: bool,
    /// The host on which the configuration must be usable, or `None` for any host.
    host: Option<Host<'a>>,
    file_faults: RefCell<Vec<ConfigFault>>,
    host_faults: RefCell<Vec<ConfigFault>>,
    /// The notes on settings that have no effect, or that are probably wrong.
    notes: RefCell<Vec<ConfigFault>>,
}

impl<'a> Context<'a> {
    fn new(file: &'a Path, env: Environment<'a>, is_root: bool, host: Option<Host<'a>>) -> Self {
        let (file_faults, host_faults, notes) = Default::default();
        Self { file, env, is_root, host, file_faults, host_faults, notes }
    }

    /// Returns the path in a value as the user wrote it, relative to the configuration file's folder.
    fn path(&self, value: &Value<'_>) -> Option<PathBuf> {
        let path = self.file.parent().unwrap_or(Path::new("")).join(value.text()?);
        value.show(quoted(&absolute(&path).to_string_lossy()));
        Some(path)
    }

    /// Records a fault of a model's own files.
    fn file_fault(&self, value: &Value<'_>, message: impl Into<String>) {
        self.file_faults.borrow_mut().push(value.describe(message));
    }

    /// Records that this host does not have a user, group, core or file that the configuration
    /// names.
    fn host_fault(&self, value: &Value<'_>, message: impl std::fmt::Display) {
        self.host_faults.borrow_mut().push(value.describe(format!("on this host {message}")));
    }

    /// Records a note. If several models have the same profile, notes on the profile are recorded
    /// only once.
    fn note(&self, value: &Value<'_>, message: impl Into<String>) {
        let (note, mut notes) = (value.describe(message), self.notes.borrow_mut());
        if !notes.contains(&note) {
            notes.push(note);
        }
    }
}

/// Returns the absolute path without `..`. A `..` after a symbolic link stays, because it means the
/// parent of the link's target.
fn absolute(path: &Path) -> PathBuf {
    // This call only fails if the process has no working directory. In that case, opening the path
    // fails too.
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

/// Checks that the path is a regular file, that it is not empty, and that this user can read it.
fn usable(path: &Path) -> Result<(), io::Error> {
    let metadata = fs::metadata(path)?;
    let kind = metadata.file_type();
    if kind.is_dir() {
        return Err(io::Error::other("this is a directory"));
    }
    if !kind.is_file() {
        return Err(io::Error::other("this is not a regular file"));
    }
    File::open(path)?;
    if metadata.len() == 0 {
        return Err(io::Error::other("the file is empty"));
    }
    Ok(())
}

/// Loads a configuration. Does not check that this host has the users, groups and cores that the
/// configuration names. [`load_here`] also checks the host.
///
/// # Errors
///
/// [`ConfigError`] if the file cannot be read or has faults.
pub fn load(path: &Path, env: Environment<'_>, is_root: bool) -> Result<Config, ConfigError> {
    load_on(path, env, is_root, None)
}

fn load_on(
    path: &Path,
    env: Environment<'_>,
    is_root: bool,
    host: Option<Host<'_>>,
) -> Result<Config, ConfigError> {
    let log = FaultLog::new(path);
    let text =
        yaml::read(path, &log).map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
    let Some(tree) = text.and_then(|text| yaml::parse(&text, EXAMPLE, &log)) else {
        return Err(ConfigError::Faults(log.into_sorted()));
    };
    let context = Context::new(path, env, is_root, host);
    let config = read(tree, &log, &context);
    let mut faults = log.into_sorted();
    if faults.is_empty() {
        return Ok(config);
    }
    faults.extend(config.file_faults);
    faults.extend(config.host_faults);
    Err(ConfigError::Faults(faults))
}

/// Loads a configuration in the environment of this process, and checks it against this host.
/// Faults of models' own files and of this host do not prevent loading. They are in
/// [`Config::file_faults`] and [`Config::host_faults`].
///
/// # Errors
///
/// [`ConfigError`] if the file cannot be read or has other faults.
pub fn load_here(path: &Path) -> Result<Config, ConfigError> {
    load_for_check(path, &|_| None)
}

/// Loads a configuration like [`load_here`], and also checks that a supervisor can use its run
/// directory.
fn load_for_check(path: &Path, run_dir: RunDirCheck<'_>) -> Result<Config, ConfigError> {
    let is_root = nix::unistd::geteuid().is_root();
    load_on(path, &|name| std::env::var_os(name), is_root, Some(Host::new(run_dir)))
}

const EXAMPLE: &str = "models: [{path: digits.onnx, slo: 20ms}]";

/// Returns the default run directory in the environment of this process.
pub fn default_run_dir() -> Option<PathBuf> {
    settings::default_run_dir(&|name| std::env::var_os(name), nix::unistd::geteuid().is_root())
}

/// Reads the whole document. A value with a fault is replaced with its default.
fn read(root: Arc<YamlNode>, log: &FaultLog, context: &Context<'_>) -> Config {
    let fields = Value::root(&root, &CONFIG, log).fields();
    let run_dir = settings::run_dir(&fields, context);
    let listen = listen::listen(&fields, &run_dir, context);
    let gpus = fields.read("gpus", |list| Some(gpus::gpus(list)));
    let limits = settings::limits(&fields, context);
    let controller = settings::controller(&fields, context);
    let sections = models::Sections { gpus: &gpus, limits: &limits, controller: &controller };
    let models = models::models(&fields, &sections, context);
    let (timeouts, lame_duck) = settings::timeouts(&fields);
    let ready = fields.read("ready", |value| settings::ready(value, &models));
    let workers = settings::workers(&fields, models.len());
    let control = fields.optional("control", |value| peers::listed(value, context));
    let model_control =
        fields.read("model_control", |value| peers::access(value, context, |word| word.one_of(&ACCESS)));
    let tenants = tenants::tenants(&fields, context);
    let strict_start = fields.read("start", |value| value.one_of(&STARTS));
    let onnxruntime = fields.section("onnxruntime").optional("library", |value| context.path(value));
    let tracing = tracing::tracing(&fields);
    let access_log = fields.optional("access_log", |value| settings::access_log(value, context));
    let mut host_faults = unique(context.host_faults.take());
    host_faults.sort_by_key(|fault| fault.at);
    Config {
        run_dir,
        listen,
        gpus,
        models,
        control,
        model_control,
        tenants,
        controller,
        limits,
        timeouts,
        lame_duck,
        strict_start,
        ready,
        onnxruntime: OnnxRuntimeConfig { library: onnxruntime.as_deref().map(absolute) },
        workers,
        tracing,
        access_log,
        file_faults: unique(context.file_faults.take()),
        host_faults,
        notes: context.notes.take(),
        document: Document { file: context.file.to_owned(), keys: log.take_keys(), root },
    }
}
