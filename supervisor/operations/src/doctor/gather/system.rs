//! Collects the facts about the host that do not concern its GPUs.

use std::ffi::OsString;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use nix::libc::RLIM_INFINITY;
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::statvfs::statvfs;
use nix::unistd::{AccessFlags, eaccess, geteuid};

use crate::admin::SOCKET;
use crate::doctor::facts::{Problem, RunDirState, SystemFacts};
use shadowslice_config as config;
use shadowslice_config::Config;
use shadowslice_control::host;
use shadowslice_control::host::unsafe_because;
use shadowslice_control::process::may_raise_priority;

/// The variables that CUDA and MPS read, in addition to those with the prefix CUDA_MPS_.
const VARIABLES: [&str; 2] = ["CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS"];

const SHARED_MEMORY: &str = "/dev/shm";

pub(super) fn facts(config: Option<&Config>) -> SystemFacts {
    SystemFacts {
        variables: variables(std::env::vars_os()),
        uid: geteuid().as_raw(),
        may_raise_priority: may_raise_priority(),
        // The supervisor raises its own soft limit to the hard limit.
        open_files: limit(Resource::RLIMIT_NOFILE, |(_, hard)| hard),
        locked_memory: limit(Resource::RLIMIT_MEMLOCK, |(soft, _)| soft),
        shared_memory: shared_memory(),
        run_dir: run_dir(config),
        worker: host::worker_program().map_err(|error| Problem::of(&error)),
    }
}

fn variables(all: impl Iterator<Item = (OsString, OsString)>) -> Vec<(String, String)> {
    let text = |text: OsString| text.to_string_lossy().into_owned();
    let all = all.map(|(name, value)| (text(name), text(value)));
    let matters = |name: &str| name.starts_with("CUDA_MPS_") || VARIABLES.contains(&name);
    let mut found: Vec<_> = all.filter(|(name, _)| matters(name)).collect();
    found.sort();
    found
}

/// Returns a limit, or `None` if the resource is unlimited or the limit cannot be read.
fn limit(resource: Resource, which: impl Fn((u64, u64)) -> u64) -> Option<u64> {
    getrlimit(resource).ok().map(which).filter(|limit| *limit != RLIM_INFINITY)
}

fn shared_memory() -> Option<u64> {
    eaccess(SHARED_MEMORY, AccessFlags::W_OK | AccessFlags::X_OK).ok()?;
    let stat = statvfs(SHARED_MEMORY).ok()?;
    Some(stat.blocks().saturating_mul(stat.fragment_size()))
}

fn run_dir(config: Option<&Config>) -> RunDirState {
    let path = config.map(|config| config.run_dir.clone()).or_else(config::default_run_dir);
    path.map_or(RunDirState::Unknown, inspect)
}

/// Returns whether a run directory can be used. If it does not exist, returns whether it can be
/// created.
fn inspect(path: PathBuf) -> RunDirState {
    if UnixStream::connect(path.join(SOCKET)).is_ok() {
        return RunDirState::Taken(path);
    }
    let Some(there) = path.ancestors().find(|path| path.symlink_metadata().is_ok()).map(Path::to_owned)
    else {
        return RunDirState::Unusable(path, "no folder on its path exists".to_owned());
    };
    if let Ok(Some(why)) = unsafe_because(&path) {
        return RunDirState::Unusable(path, why.to_owned());
    }
    if !there.is_dir() {
        return RunDirState::Unusable(path, format!("{} is not a folder", there.display()));
    }
    match eaccess(&there, AccessFlags::W_OK | AccessFlags::X_OK) {
        Ok(()) => RunDirState::Usable(path),
        Err(error) => {
            let why = format!("cannot write to {}: {}", there.display(), error.desc());
            RunDirState::Unusable(path, why)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_run_directory_is_usable_taken_or_unusable() {
        let folder = tempfile::tempdir().unwrap();
        let [there, new, file] = ["there", "new/below", "file"].map(|name| folder.path().join(name));
        std::fs::create_dir(&there).unwrap();
        std::fs::write(&file, "").unwrap();
        assert_eq!(inspect(there.clone()), RunDirState::Usable(there.clone()));
        assert_eq!(inspect(new.clone()), RunDirState::Usable(new));
        let below = file.join("below");
        assert_eq!(
            inspect(below.clone()),
            RunDirState::Unusable(below, format!("{} is not a folder", file.display()))
        );
        let supervisor = UnixListener::bind(there.join(SOCKET)).unwrap();
        assert_eq!(inspect(there.clone()), RunDirState::Taken(there.clone()));
        drop(supervisor);
        assert_eq!(
            inspect(there.clone()),
            RunDirState::Usable(there),
            "the socket of a dead supervisor does not count"
        );
    }

    #[test]
    fn variables_that_cuda_reads_are_found() {
        let all = ["PATH", "CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY", "CUDA_HOME"];
        let found = variables(all.iter().map(|name| ((*name).into(), "x".into())));
        let names: Vec<_> = found.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["CUDA_MPS_PIPE_DIRECTORY", "CUDA_VISIBLE_DEVICES"]);
    }
}
