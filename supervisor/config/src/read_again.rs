//! Reads a model of a loaded configuration again, or another version of the model.

use std::path::Path;

use super::Context;
use super::faults::FaultLog;
use super::keys::CONFIG;
use super::models::{self, Sections};
use super::reader::Value;
use super::types::{Config, ModelConfig};
use super::versions::VersionSource;

/// Reads a model of the operator's configuration and its files again. The result is the same
/// version, with the same path.
pub(super) fn read_again(config: &Config, written: &ModelConfig) -> Option<ModelConfig> {
    let source = VersionSource {
        number: written.version.number,
        folder: written.version.folder.clone(),
        path: written.engine.path().map(Path::to_owned),
        missing: None,
    };
    read(config, written.served_name(), source)
}

/// Returns the configuration of a version of a model, whose file or folder is at this absolute
/// path. Reads the model's item in the document and the version's files. Ignores the key
/// `versions`. Returns `None` if no item has this name.
///
/// If a file of the version is missing or invalid, or if the item's keys do not fit the version,
/// the field `broken` has the reason. For `gpu: auto`, the GPU is 0. If the item gives no initial
/// share, it is the whole GPU.
pub fn version_of(config: &Config, model: &str, number: u32, path: &Path) -> Option<ModelConfig> {
    let served = config.models.iter().find(|served| served.served_name() == model)?;
    let folder = served.version.folder.clone();
    read(config, model, VersionSource { number, folder, path: Some(path.to_owned()), missing: None })
}

/// Reads the item of the model with this name, but the files of this version.
fn read(config: &Config, name: &str, source: VersionSource) -> Option<ModelConfig> {
    let Config { gpus, limits, controller, document, .. } = config;
    let log = FaultLog::new(&document.file);
    let context = Context::new(&document.file, &|_| None, false, None);
    let items = Value::root(&document.root, &CONFIG, &log).entry("models")?.items();
    let item = items.iter().map(Value::fields).find(|keys| models::name(keys) == name)?;
    let sections = Sections { gpus, limits, controller };
    let model = models::model(&item, &source, &sections, &context);
    // The document has no faults, so that these are faults of keys that do not fit the version's
    // engine.
    let fault = log.into_sorted().first().map(ToString::to_string);
    Some(ModelConfig { broken: model.broken.clone().or(fault), ..model })
}

#[cfg(test)]
mod tests;
