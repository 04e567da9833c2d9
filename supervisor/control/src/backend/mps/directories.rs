//! The directories of a daemon that the supervisor starts, and the processes that use them.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, geteuid};
use procfs::process::{Process, all_processes};
use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep};

use crate::backend::PIPE_DIRECTORY;

/// The maximum length in bytes of a pipe directory that MPS certainly accepts. MPS appends the
/// names of sockets to it.
const MAX_PIPE_BYTES: usize = 75;

const DEFAULT_PIPES: [&str; 2] = ["/tmp/nvidia-mps", "/run/nvidia-mps"];

/// The length of a log's end that is shown, in bytes.
const LOG_TAIL_BYTES: i64 = 2048;

/// The time within which killed processes must exit.
const KILL_TIMEOUT: Duration = Duration::from_secs(5);

/// The time between two checks for killed processes. Most are not children of this process.
const EXIT_CHECK_INTERVAL: Duration = Duration::from_millis(10);

/// The prefix of the names of MPS programs.
const PROGRAM_PREFIX: &str = "nvidia-cuda-mps-";

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Directories {
    pub(super) pipe: PathBuf,
    pub(super) log: PathBuf,
}

impl Directories {
    /// Returns the directories of the `index`th GPU's daemon, which are the same every time. If the
    /// path of the pipe directory in `private` is too long, the directory is in `/tmp`.
    pub(super) fn of(private: &Path, index: usize) -> Self {
        let folder = private.join(format!("mps{index}"));
        let pipe = folder.join("pipe");
        let log = folder.join("log");
        if pipe.as_os_str().len() <= MAX_PIPE_BYTES {
            return Self { pipe, log };
        }
        let name = format!("shadowslice-{}-{:08x}-{index}", geteuid(), hash(private.as_os_str()));
        Self { pipe: Path::new("/tmp").join(name), log }
    }

    /// Creates the directories. If `passable` is true, other users' clients can open the pipes,
    /// whose names they know.
    pub(super) fn make(&self, passable: bool) -> io::Result<()> {
        let mode = if passable { 0o711 } else { 0o700 };
        for directory in [&self.pipe, &self.log] {
            DirBuilder::new().recursive(true).mode(mode).create(directory)?;
            let found = fs::symlink_metadata(directory)?;
            let closed = found.mode() & 0o777 & !mode == 0;
            if !found.is_dir() || found.uid() != geteuid().as_raw() || !closed {
                return Err(io::Error::other(format!(
                    "{} already exists and is not a private directory of this user; remove this path",
                    directory.display()
                )));
            }
        }
        Ok(())
    }

    pub(super) fn remove(&self) {
        for directory in [&self.pipe, &self.log] {
            match fs::remove_dir_all(directory) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::warn!(
                        path = %directory.display(),
                        %error,
                        "cannot remove an MPS directory; the supervisor uses the directory again at its next start"
                    );
                }
                _ => {}
            }
        }
        // The folder of the GPU is removed only if it is empty.
        if let Some(folder) = self.log.parent() {
            fs::remove_dir(folder).ok();
        }
    }

    /// Returns the MPS processes, including `program`, that use this pipe directory.
    pub(super) fn users(&self, program: &Path) -> Vec<i32> {
        let uses_this = |process: &Process| {
            let pipe = process.environ().ok().and_then(|mut all| all.remove(OsStr::new(PIPE_DIRECTORY)));
            is_mps(process, program) && pipe.as_deref() == Some(self.pipe.as_os_str())
        };
        let all = all_processes().into_iter().flatten().flatten();
        all.filter(uses_this).map(|process| process.pid).collect()
    }

    /// Kills the MPS processes that use this pipe directory, and waits until they have exited.
    pub(super) async fn kill_users(&self, program: &Path) {
        let begun = Instant::now();
        loop {
            let users = self.users(program);
            if users.is_empty() {
                return;
            }
            if begun.elapsed() > KILL_TIMEOUT {
                tracing::error!(
                    pids = ?users,
                    place = %self.pipe.display(),
                    "MPS processes did not exit after SIGKILL, probably because the GPU driver blocks them; look for Xid errors in `dmesg`, and reboot the host if the processes stay"
                );
                return;
            }
            for pid in &users {
                // An error means that the process has exited.
                kill(Pid::from_raw(*pid), Signal::SIGKILL).ok();
            }
            sleep(EXIT_CHECK_INTERVAL).await;
        }
    }

    pub(super) fn logs(&self) -> String {
        let tails = ["control.log", "server.log"].map(|name| tail(&self.log.join(name)));
        tails.concat().trim_end().to_owned()
    }

    pub(super) fn server_log(&self) -> String {
        tail(&self.log.join("server.log"))
    }
}

/// Returns the directory and process ID of another owner's daemon, if one runs in a default
/// directory or in `named`, the directory in this process's environment.
pub(super) fn foreign_daemon(named: Option<PathBuf>, program: &Path) -> Option<(PathBuf, i32)> {
    let places = named.into_iter().chain(DEFAULT_PIPES.map(PathBuf::from));
    places.into_iter().find_map(|place| {
        let file = fs::read_to_string(place.join("nvidia-cuda-mps-control.pid")).ok()?;
        let pid = file.trim().parse().ok()?;
        Process::new(pid).ok().filter(|process| is_mps(process, program))?;
        Some((place, pid))
    })
}

fn is_mps(process: &Process, program: &Path) -> bool {
    let arguments = process.cmdline().unwrap_or_default();
    let name = arguments.first().and_then(|first| Path::new(first).file_name());
    name.is_some_and(|name| {
        name.as_bytes().starts_with(PROGRAM_PREFIX.as_bytes()) || Some(name) == program.file_name()
    })
}

fn tail(path: &Path) -> String {
    let read = || {
        let mut file = fs::File::open(path)?;
        let length = file.metadata()?.len();
        if i64::try_from(length).is_ok_and(|length| length > LOG_TAIL_BYTES) {
            file.seek(SeekFrom::End(-LOG_TAIL_BYTES))?;
        }
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        io::Result::Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    read().unwrap_or_default()
}

/// Returns the FNV-1a hash, which is the same in every build. A later supervisor can therefore find
/// the directories of an earlier one.
fn hash(text: &OsStr) -> u32 {
    text.as_bytes().iter().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn pipe_directories_are_short_and_the_same_every_time() {
        let short = Directories::of(Path::new("/run/shadowslice/private"), 0);
        assert_eq!(short.pipe, Path::new("/run/shadowslice/private/mps0/pipe"));
        let deep = PathBuf::from(format!("/{}/private", "d".repeat(90)));
        let long = Directories::of(&deep, 3);
        assert!(long.pipe.as_os_str().len() <= MAX_PIPE_BYTES && long.pipe.starts_with("/tmp"), "{long:?}");
        assert_eq!(long, Directories::of(&deep, 3));
        assert_ne!(long.pipe, Directories::of(&deep, 4).pipe);
    }

    #[test]
    fn what_others_may_read_is_not_lived_in() {
        let folder = tempfile::tempdir().unwrap();
        let place = Directories::of(folder.path(), 0);
        place.make(false).unwrap();
        place.make(false).unwrap();
        fs::set_permissions(&place.pipe, fs::Permissions::from_mode(0o755)).unwrap();
        assert!(place.make(false).is_err());
        place.remove();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
