//! `shadowslice check`.

use std::io::{self, Write};
use std::path::Path;

use shadowslice_shared::{errors, exit};

use super::examined_here;
use super::faults::{ConfigError, FaultList};
use super::host::RunDirCheck;
use super::render::render;
use super::types::{Config, ModelConfig};

/// What is wrong with a model, if anything is.
pub type ModelCheck<'l> = &'l dyn Fn(&ModelConfig) -> Option<String>;

/// Notes about what is unwise on this host and still works.
pub type HostAdvice<'a> = &'a dyn Fn(&Config) -> Vec<String>;

/// Returns the exit status. Faults go to `err`, where an error of writing is ignored. A summary, or
/// the whole configuration if `print` says so, goes to `out`. If there are no faults, an error of
/// writing to `out` is returned. `fault_of` looks at a model more closely; `advice` becomes notes.
pub fn run(
    path: &Path,
    print: bool,
    (run_dir, fault_of, advice): (RunDirCheck<'_>, ModelCheck<'_>, HostAdvice<'_>),
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> io::Result<u8> {
    match examined_here(path, run_dir) {
        Ok(config) => report((path, &config, print), (fault_of, advice), out, err),
        Err(error) => {
            let kind = if matches!(error, ConfigError::Read { .. }) { "error: " } else { "" };
            writeln!(err, "{kind}{}", errors::chain(&error)).ok();
            Ok(exit::CONFIG)
        }
    }
}

fn report(
    (path, config, print): (&Path, &Config, bool),
    (fault_of, advice): (ModelCheck<'_>, HostAdvice<'_>),
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> io::Result<u8> {
    for note in &config.notes {
        writeln!(err, "note: {note}").ok();
    }
    for note in advice(config) {
        writeln!(err, "note: {note}").ok();
    }
    let printed = if print { out.write_all(render(config).as_bytes()) } else { Ok(()) };
    let faults = [&config.file_faults[..], &config.host_faults].concat();
    if !faults.is_empty() {
        writeln!(err, "{}", FaultList(&faults)).ok();
    }
    let usable = config.models.iter().filter(|model| model.broken.is_none());
    let more: Vec<String> = usable.filter_map(fault_of).collect();
    more.iter().for_each(|fault| {
        writeln!(err, "{fault}").ok();
    });
    if !(faults.is_empty() && more.is_empty()) {
        return Ok(exit::CONFIG);
    }
    printed?;
    if !print {
        let models = counted(config.models.len(), "model");
        let gpus = counted(config.gpus.len(), "GPU");
        writeln!(out, "{}: {models} on {gpus}: fine", path.display())?;
    }
    out.flush()?;
    Ok(0)
}

fn counted(count: usize, what: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {what}{plural}")
}
