//! Reads the key `versions` of models, and finds the versions in a folder.

use std::fs::{self, DirEntry};
use std::path::{Path, PathBuf};

use super::faults::ConfigFault;
use super::keys::{ENGINES, VERSIONS};
use super::reader::{Fields, Value};
use super::types::{ModelVersion, VersionFolder, VersionPolicy};
use super::{Context, absolute};
use crate::engine::{EngineName, ONNX_FILE, PYTHON_FILE};

/// The maximum number of entries of a folder among which versions are searched.
const MAX_ENTRIES: usize = 4096;

/// The maximum number of versions that a model serves.
pub(super) const MAX_VERSIONS: usize = 64;

/// A version in a folder of versions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundVersion {
    /// The number of the version.
    pub number: u32,
    /// The path that the engine gets: the ONNX file, or the folder with `model.py`.
    pub path: PathBuf,
}

/// Returns the versions in a folder, in ascending order. Returns none if the folder cannot be read.
/// A version is a folder whose name is a whole number from 1, and which contains `model.py` or
/// `model.onnx`. If the folder contains both files, the version is a Python model.
pub fn find_versions(folder: &Path) -> Vec<FoundVersion> {
    let entries = fs::read_dir(folder).into_iter().flatten().take(MAX_ENTRIES);
    let mut found: Vec<_> = entries.flatten().filter_map(|entry| version(&entry)).collect();
    found.sort_unstable_by_key(|version| version.number);
    found
}

fn version(entry: &DirEntry) -> Option<FoundVersion> {
    let name = entry.file_name();
    let number = name.to_str()?.parse().ok().filter(|number: &u32| *number > 0)?;
    // Excludes other forms of the number, such as `01` and `+1`.
    if number.to_string().as_str() != name {
        return None;
    }
    let (folder, onnx) = (entry.path(), entry.path().join(ONNX_FILE));
    if folder.join(PYTHON_FILE).is_file() {
        return Some(FoundVersion { number, path: folder });
    }
    onnx.is_file().then_some(FoundVersion { number, path: onnx })
}

impl VersionPolicy {
    /// Returns the versions to serve. `found` contains the versions of the folder in ascending
    /// order.
    pub fn select<'f>(&self, found: &'f [FoundVersion]) -> Vec<&'f FoundVersion> {
        match self {
            Self::Latest => found.last().into_iter().collect(),
            Self::All => found[found.len().saturating_sub(MAX_VERSIONS)..].iter().collect(),
            Self::Listed(numbers) => {
                found.iter().filter(|version| numbers.contains(&version.number)).collect()
            }
        }
    }
}

/// The place from which a version of a model is read.
#[derive(Debug, Clone)]
pub(super) struct VersionSource {
    pub(super) number: u32,
    pub(super) folder: Option<VersionFolder>,
    /// The path of the version, or `None` for the key `path`.
    pub(super) path: Option<PathBuf>,
    /// The fault of a version that does not exist.
    pub(super) missing: Option<ConfigFault>,
}

impl VersionSource {
    /// Returns the source of a model whose key `path` is a single version.
    fn single() -> Self {
        Self { number: 1, folder: None, path: None, missing: None }
    }

    /// Returns the path that the engine gets. `written` is the key `path`.
    pub(super) fn engine_path(&self, written: PathBuf, engine: EngineName) -> PathBuf {
        match &self.path {
            Some(path) if engine == EngineName::OnnxRuntime && path.is_dir() => path.join(ONNX_FILE),
            Some(path) if engine == EngineName::Python && path.ends_with(ONNX_FILE) => {
                path.parent().unwrap_or(path).to_owned()
            }
            // Faults show the path as the user wrote it.
            Some(path) if *path != absolute(&written) => path.clone(),
            Some(_) | None => written,
        }
    }

    /// Returns the version of the model with this name.
    pub(super) fn version(&self, model: String) -> ModelVersion {
        ModelVersion { model, number: self.number, folder: self.folder.clone() }
    }
}

/// Returns the sources of the versions to serve of a model, in ascending order of their numbers.
/// There is at least one source. If the versions do not exist, the sources have faults.
pub(super) fn sources(model: &Fields<'_>, context: &Context<'_>) -> Vec<VersionSource> {
    let Some(place) = place(model, context) else { return vec![VersionSource::single()] };
    if !place.is_folder_of_versions(model) {
        model.forbid(&["versions"], "`path` is not a folder of versions, such as a folder with 1/model.onnx");
        return vec![VersionSource::single()];
    }
    let folder = place.folder(model);
    let found = find_versions(&place.path);
    let source = |number, path: &Path, missing| VersionSource {
        number,
        folder: Some(folder.clone()),
        path: Some(path.to_owned()),
        missing,
    };
    if let VersionPolicy::Listed(numbers) = &folder.policy {
        let listed = |number: &u32| match found.iter().find(|version| version.number == *number) {
            Some(version) => source(*number, &version.path, None),
            None => source(*number, &place.expected(*number), Some(place.not_found(*number, model))),
        };
        return numbers.iter().map(listed).collect();
    }
    if let Some(value) = model.get("versions").filter(|_| found.len() > MAX_VERSIONS)
        && folder.policy == VersionPolicy::All
    {
        let message =
            format!("the folder has {} versions; only the newest {MAX_VERSIONS} are served", found.len());
        context.note(&value, message);
    }
    match &folder.policy.select(&found)[..] {
        [] => vec![source(1, &place.expected(1), Some(place.empty()))],
        served => served.iter().map(|version| source(version.number, &version.path, None)).collect(),
    }
}

/// The key `path` of a model.
struct ModelPlace<'a> {
    value: Value<'a>,
    /// The path as the user wrote it, relative to the configuration file's folder.
    path: PathBuf,
    engine: Option<EngineName>,
}

/// Returns the key `path` of a model. `None` if the key has a fault, or if the engine has no file.
fn place<'a>(model: &Fields<'a>, context: &Context<'_>) -> Option<ModelPlace<'a>> {
    let engine = model.optional("engine", |value| value.one_of(&ENGINES));
    let value = model.get("path").filter(|_| engine != Some(EngineName::Emulated))?;
    Some(ModelPlace { path: context.path(&value)?, value, engine })
}

impl ModelPlace<'_> {
    /// Returns whether the path is a folder of versions, or should be one.
    fn is_folder_of_versions(&self, model: &Fields<'_>) -> bool {
        let is_wanted = model.has("versions");
        // Any other fault of the path is that of a model's file.
        let is_guess = self.engine.is_none() && EngineName::of_extension(&self.path).is_none();
        match fs::metadata(&self.path) {
            Ok(found) if !found.is_dir() || self.path.join(PYTHON_FILE).is_file() => false,
            Ok(_) => is_wanted || is_guess || !find_versions(&self.path).is_empty(),
            Err(_) => is_wanted || is_guess && self.path.extension().is_none(),
        }
    }

    fn folder(&self, model: &Fields<'_>) -> VersionFolder {
        VersionFolder { path: absolute(&self.path), policy: model.read("versions", policy) }
    }

    /// Returns the path of a version that does not exist.
    fn expected(&self, number: u32) -> PathBuf {
        self.path.join(number.to_string()).join(ONNX_FILE)
    }

    fn not_found(&self, number: u32, model: &Fields<'_>) -> ConfigFault {
        let value = model.get("versions");
        let folder = self.path.display();
        value.as_ref().unwrap_or(&self.value).describe(format!(
            "version {number} not found in {folder}; add {number}/{ONNX_FILE} or {number}/{PYTHON_FILE} there, or \
             remove {number} from the list"
        ))
    }

    fn empty(&self) -> ConfigFault {
        let folder = self.path.display();
        self.value.describe(match fs::read_dir(&self.path) {
            Ok(_) => format!(
                "cannot use {folder}: the folder contains no version; add for example 1/{ONNX_FILE} or \
                 1/{PYTHON_FILE} there"
            ),
            Err(error) => {
                format!("cannot use {folder}: {error}; put the model there or correct the path")
            }
        })
    }
}

fn policy(value: &Value<'_>) -> Option<VersionPolicy> {
    if let Some(number) = value.word().filter(|word| word.parse::<u32>().is_ok()) {
        value.fault(format!("must be `latest`, `all` or a list; write [{number}]"));
        return None;
    }
    if value.is_scalar() {
        let is_all = value.one_of(&VERSIONS)?;
        return Some(if is_all { VersionPolicy::All } else { VersionPolicy::Latest });
    }
    let mut numbers = value.distinct(|item| item.whole());
    numbers.sort_unstable();
    (!numbers.is_empty()).then_some(VersionPolicy::Listed(numbers))
}

#[cfg(test)]
mod tests;
