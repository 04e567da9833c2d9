//! Implements the command `shadowslice check`.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::path::Path;

use shadowslice_shared::{errors, exit};

use super::faults::{ConfigError, FaultList};
use super::host::RunDirCheck;
use super::load_for_check;
use super::render::render;
use super::types::{Config, ModelConfig};

/// A function that runs additional checks of a model, and returns the model's fault, if there is
/// one.
pub type ModelCheck<'l> = &'l dyn Fn(&ModelConfig) -> Option<String>;

/// A function that returns notes on settings that work on this host but are not recommended.
pub type HostAdvice<'a> = &'a dyn Fn(&Config) -> Vec<String>;

/// The checks that need crates on which this crate does not depend. The caller provides them.
#[derive(Clone, Copy)]
pub struct CheckHooks<'a> {
    /// The function that checks the run directory.
    pub run_dir: RunDirCheck<'a>,
    /// The function that checks each model.
    pub model: ModelCheck<'a>,
    /// The function that returns notes on the host.
    pub advice: HostAdvice<'a>,
}

/// Checks a configuration and returns the exit code.
///
/// Writes faults and notes to `err`, and ignores write errors there. Writes a summary to `out`, or
/// the whole configuration if `print` is set.
///
/// # Errors
///
/// An I/O error if `out` cannot be written and the configuration has no faults.
pub fn run(
    path: &Path,
    print: bool,
    checks: CheckHooks<'_>,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> io::Result<u8> {
    match load_for_check(path, checks.run_dir) {
        Ok(config) => report(path, &config, print, checks, out, err),
        Err(error) => {
            let kind = if matches!(error, ConfigError::Read { .. }) { "error: " } else { "" };
            writeln!(err, "{kind}{}", errors::chain(&error)).ok();
            Ok(exit::CONFIG)
        }
    }
}

fn report(
    path: &Path,
    config: &Config,
    print: bool,
    checks: CheckHooks<'_>,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> io::Result<u8> {
    for note in &config.notes {
        writeln!(err, "note: {note}").ok();
    }
    for note in (checks.advice)(config) {
        writeln!(err, "note: {note}").ok();
    }
    let printed = if print { out.write_all(render(config).as_bytes()) } else { Ok(()) };
    let faults = [&config.file_faults[..], &config.host_faults].concat();
    if !faults.is_empty() {
        writeln!(err, "{}", FaultList(&faults)).ok();
    }
    let usable = config.models.iter().filter(|model| model.broken.is_none());
    let more: Vec<String> = usable.filter_map(checks.model).collect();
    more.iter().for_each(|fault| {
        writeln!(err, "{fault}").ok();
    });
    if !(faults.is_empty() && more.is_empty()) {
        return Ok(exit::CONFIG);
    }
    printed?;
    if !print {
        let models = counted_models(&config.models);
        let gpus = counted(config.gpus.len(), "GPU");
        writeln!(out, "{}: {models} on {gpus}: valid", path.display())?;
    }
    out.flush()?;
    Ok(0)
}

/// Returns the number of models, and of their versions if a model has several.
fn counted_models(instances: &[ModelConfig]) -> String {
    let names: BTreeSet<_> = instances.iter().map(ModelConfig::served_name).collect();
    let models = counted(names.len(), "model");
    match instances.len() {
        versions if versions > names.len() => format!("{models} with {versions} versions"),
        _ => models,
    }
}

fn counted(count: usize, what: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {what}{plural}")
}
