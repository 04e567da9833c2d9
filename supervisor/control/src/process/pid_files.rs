//! A file for each running worker. If a supervisor was killed, the next one finds and kills the
//! remaining workers. A worker that is stopped by a signal does not notice that its supervisor has
//! ended.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use procfs::process::Process;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// The time within which a worker must exit after its supervisor has ended, and again after
/// SIGKILL.
const EXIT_TIMEOUT: Duration = Duration::from_secs(1);

/// The file of a running worker. Dropping this removes the file.
#[derive(Debug)]
pub(super) struct PidFile(PathBuf);

impl PidFile {
    /// Writes the file of a worker. If this fails, logs the reason.
    pub(super) fn register(folder: &Path, pid: i32) -> Option<Self> {
        let unregistered = |error: &_| {
            tracing::warn!(
                pid,
                %error,
                "cannot record a worker in the run directory; if the supervisor is killed, its next start cannot kill this worker"
            );
        };
        Self::write(folder, pid).inspect_err(unregistered).ok()
    }

    /// Writes the file of a worker. Its name is the process ID, and its content is the start time.
    fn write(folder: &Path, pid: i32) -> Result<Self, Box<dyn std::error::Error>> {
        let path = folder.join(pid.to_string());
        fs::create_dir_all(folder)?;
        fs::write(&path, start_time(pid)?.to_string())?;
        Ok(Self(path))
    }
}

impl Drop for PidFile {
    fn drop(&mut self) {
        // If this fails, the next supervisor finds no process for the file.
        fs::remove_file(&self.0).ok();
    }
}

/// Returns the start time of a process, in ticks since the host's start. The kernel reuses process
/// IDs, but not with the same start time.
fn start_time(pid: i32) -> procfs::ProcResult<u64> {
    Ok(Process::new(pid)?.stat()?.starttime)
}

/// Kills the workers that another supervisor left behind with files in this folder. Blocks for at
/// most 2 s per worker.
pub fn kill_leftover_workers(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw);
        let then = fs::read_to_string(entry.path()).ok().and_then(|content| content.parse().ok());
        if let Some((pid, then)) = pid.zip(then)
            && let Err(error) = kill_leftover(pid, then)
        {
            tracing::warn!(
                pid = pid.as_raw_nonzero(),
                %error,
                "cannot end a worker that a killed supervisor left behind and that may use GPU memory; run `kill -9 PID` as root; if the process stays, look for Xid errors in `dmesg`, and reboot the host"
            );
        }
        fs::remove_file(entry.path()).ok();
    }
}

fn kill_leftover(pid: Pid, started: u64) -> io::Result<()> {
    let process = match pidfd_open(pid, PidfdFlags::empty()) {
        Err(rustix::io::Errno::SRCH) => return Ok(()),
        opened => opened?,
    };
    // The pidfd is open already, so the process ID cannot pass to another process unnoticed.
    let is_leftover = start_time(pid.as_raw_nonzero().get()).is_ok_and(|found| found == started);
    let exits = || -> io::Result<bool> {
        let within = PollTimeout::try_from(EXIT_TIMEOUT).map_err(io::Error::other)?;
        Ok(poll(&mut [PollFd::new(process.as_fd(), PollFlags::POLLIN)], within)? > 0)
    };
    if !is_leftover || exits()? {
        return Ok(());
    }
    tracing::warn!(pid = pid.as_raw_nonzero(), "killing a worker that a killed supervisor left behind");
    pidfd_send_signal(&process, Signal::KILL)?;
    if exits()? { Ok(()) } else { Err(io::ErrorKind::TimedOut.into()) }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::*;

    fn sleeper() -> (Child, i32) {
        let child = Command::new("/bin/sleep").arg("60").spawn().unwrap();
        let pid = child.id().cast_signed();
        (child, pid)
    }

    #[test]
    fn what_was_left_is_ended_and_no_other_process_of_that_number() {
        let folder = tempfile::tempdir().unwrap();
        let ((mut left, left_pid), (mut other, other_pid)) = (sleeper(), sleeper());
        std::mem::forget(PidFile::write(folder.path(), left_pid).unwrap());
        fs::write(folder.path().join(other_pid.to_string()), "1").unwrap();
        fs::write(folder.path().join("nonsense"), "").unwrap();
        drop(PidFile::write(folder.path(), std::process::id().cast_signed()).unwrap());
        kill_leftover_workers(folder.path());
        assert!(!left.wait().unwrap().success());
        assert!(other.try_wait().unwrap().is_none());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        other.kill().unwrap();
        other.wait().unwrap();
    }
}
