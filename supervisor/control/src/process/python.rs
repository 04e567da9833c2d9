//! The environment with which a Python interpreter runs as a worker.

use std::ffi::OsString;
use std::path::Path;

use super::worker::SpawnError;

/// The variables from which Python libraries read their number of threads.
const THREADS: [&str; 3] = ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"];

/// Adds the variables with which an interpreter finds the package before all other packages.
pub(super) fn add_python(
    environment: &mut Vec<(OsString, OsString)>,
    package: &Path,
    threads: u32,
) -> Result<(), SpawnError> {
    if !package.is_dir() {
        return Err(SpawnError::NoPackage(package.to_owned()));
    }
    let before = environment.iter().position(|(name, _)| name == "PYTHONPATH");
    let before = before.map(|index| environment.swap_remove(index).1);
    environment.extend(python_variables(package, before).map(|(name, value)| (name.into(), value)));
    environment.extend(THREADS.map(|name| (name.into(), threads.to_string().into())));
    Ok(())
}

/// Returns variables with which an interpreter searches `package` before `path`, its own search
/// path.
pub(crate) fn python_variables(package: &Path, path: Option<OsString>) -> [(&'static str, OsString); 3] {
    let mut folders = package.as_os_str().to_owned();
    if let Some(path) = path {
        folders.push(":");
        folders.push(path);
    }
    // PYTHONSAFEPATH prevents the interpreter from loading modules from its working directory.
    [("PYTHONPATH", folders), ("PYTHONSAFEPATH", "1".into()), ("PYTHONDONTWRITEBYTECODE", "1".into())]
}
