//! The measured profiles from which the models of mixes are drawn.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use shadowslice_config as config;
use shadowslice_config::ConfigError;

use super::mixes::{self, MeasuredProfile};

/// An error that makes it impossible to draw mixes.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MixError {
    #[error("cannot list {}; set --profiles to the folder of the models' profiles", path.display())]
    List { path: PathBuf, source: io::Error },
    #[error("cannot draw models: {} has no measured profile; set --profiles to a folder with measured profiles", path.display())]
    Empty { path: PathBuf },
    #[error("cannot write {}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("cannot load {}, a configuration with all profiles", path.display())]
    Use { path: PathBuf, source: ConfigError },
    #[error("cannot load the profile {}; run `shadowslice check` on a configuration that uses it", path.display())]
    Broken { path: PathBuf },
}

/// Returns the measured profiles of a folder, in the order of their names. Writes a configuration
/// with all profiles of the folder to the file `all`, and reads the profiles from this
/// configuration.
pub(crate) fn known(folder: &Path, all: &Path) -> Result<Vec<MeasuredProfile>, MixError> {
    let list = |source| MixError::List { path: folder.to_owned(), source };
    let folder = folder.canonicalize().map_err(list)?;
    let mut files = Vec::new();
    for entry in fs::read_dir(&folder).map_err(list)? {
        files.push(entry.map_err(list)?.path());
    }
    files.retain(|file| file.extension().is_some_and(|it| it == "yaml"));
    files.sort();
    let stem =
        |file: &PathBuf| file.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    let names: Vec<String> = files.iter().map(stem).collect();
    let text = mixes::all(names.iter().map(String::as_str).zip(files.iter().map(PathBuf::as_path)));
    fs::write(all, text).map_err(|source| MixError::Write { path: all.to_owned(), source })?;
    let read = config::load_here(all);
    let models = read.map_err(|source| MixError::Use { path: all.to_owned(), source })?.models;
    let mut known = Vec::new();
    for (file, model) in files.into_iter().zip(models) {
        let Some(profile) = model.profile else { return Err(MixError::Broken { path: file }) };
        if profile.source.is_measured() {
            let one_ms = profile.execution.time(1, f64::from(mixes::SMS)).as_secs_f64() * 1e3;
            known.push(MeasuredProfile { name: model.name, profile: file, one_ms });
        }
    }
    if known.is_empty() { Err(MixError::Empty { path: folder }) } else { Ok(known) }
}
