//! A file for each worker that runs, so that the next supervisor ends those that one left that was
//! killed: a worker that is stopped does not notice that its supervisor is gone.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use procfs::process::Process;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// How long a worker may take to end by itself, once its supervisor is gone, and once it is killed.
const ENDS_WITHIN: Duration = Duration::from_secs(1);

/// Goes with the worker.
#[derive(Debug)]
pub(super) struct Entry(PathBuf);

impl Entry {
    /// Its name is the process's number, and its content the time of its start.
    pub(super) fn write(folder: &Path, pid: i32) -> Result<Self, Box<dyn std::error::Error>> {
        let path = folder.join(pid.to_string());
        fs::create_dir_all(folder)?;
        fs::write(&path, began(pid)?.to_string())?;
        Ok(Self(path))
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        // The next supervisor finds no such process.
        fs::remove_file(&self.0).ok();
    }
}

/// Since the host's start, in ticks. Numbers of processes come again, with other times.
fn began(pid: i32) -> procfs::ProcResult<u64> {
    Ok(Process::new(pid)?.stat()?.starttime)
}

/// Ends the workers that another supervisor left in this folder. Blocks, for 2 s a worker at most.
pub fn end_those_left(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let pid = name.to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw);
        let then = fs::read_to_string(entry.path()).ok().and_then(|content| content.parse().ok());
        if let Some((pid, then)) = pid.zip(then)
            && let Err(error) = end(pid, then)
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

fn end(pid: Pid, then: u64) -> io::Result<()> {
    let process = match pidfd_open(pid, PidfdFlags::empty()) {
        Err(rustix::io::Errno::SRCH) => return Ok(()),
        opened => opened?,
    };
    // Looked at while the number cannot come to stand for another process unnoticed.
    let is_left = began(pid.as_raw_nonzero().get()).is_ok_and(|began| began == then);
    let ends = || -> io::Result<bool> {
        let within = PollTimeout::try_from(ENDS_WITHIN).map_err(io::Error::other)?;
        Ok(poll(&mut [PollFd::new(process.as_fd(), PollFlags::POLLIN)], within)? > 0)
    };
    if !is_left || ends()? {
        return Ok(());
    }
    tracing::warn!(pid = pid.as_raw_nonzero(), "killing a worker that a killed supervisor left behind");
    pidfd_send_signal(&process, Signal::KILL)?;
    if ends()? { Ok(()) } else { Err(io::ErrorKind::TimedOut.into()) }
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
        std::mem::forget(Entry::write(folder.path(), left_pid).unwrap());
        fs::write(folder.path().join(other_pid.to_string()), "1").unwrap();
        fs::write(folder.path().join("nonsense"), "").unwrap();
        drop(Entry::write(folder.path(), std::process::id().cast_signed()).unwrap());
        end_those_left(folder.path());
        assert!(!left.wait().unwrap().success());
        assert!(other.try_wait().unwrap().is_none());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        other.kill().unwrap();
        other.wait().unwrap();
    }
}
