//! Ends a worker when its supervisor has ended.
//!
//! A worker that waits for batches finds its sockets closed. A worker whose model hangs does not,
//! so a thread watches the supervisor's process.

use std::io;
use std::os::fd::OwnedFd;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{PidfdFlags, getppid, pidfd_open};

/// The time that a worker may take to exit by itself after the end of its supervisor. A batch on
/// the GPU must end, and a model may run code at its exit.
const EXIT_TIMEOUT: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };

/// The process that has started this one.
#[derive(Debug)]
pub(crate) struct ParentProcess {
    pid: rustix::process::Pid,
    /// A descriptor that becomes readable when the parent exits.
    ended: OwnedFd,
}

impl ParentProcess {
    /// Returns `None` if the parent is in another PID namespace and therefore not visible.
    pub(crate) fn find() -> io::Result<Option<Self>> {
        let Some(pid) = getppid() else { return Ok(None) };
        Ok(Some(Self { pid, ended: pidfd_open(pid, PidfdFlags::empty())? }))
    }

    /// Starts a thread that ends this process after its parent. Call this after
    /// [`crate::sandbox::enter`]: the sandbox covers the calling thread and threads that start
    /// later, and a model can have any thread run its code.
    pub(crate) fn exit_with_parent(self) -> io::Result<()> {
        std::thread::Builder::new().name("parent".to_owned()).spawn(move || self.watch()).map(drop)
    }

    fn watch(&self) {
        while poll(&mut [PollFd::new(&self.ended, PollFlags::IN)], None) == Err(Errno::INTR) {}
        if getppid() == Some(self.pid) {
            // The model has closed descriptors that it does not own, so nothing can be watched.
            return;
        }
        // A signal only shortens this wait.
        poll(&mut [], Some(&EXIT_TIMEOUT)).ok();
        // SIGKILL, because exit handlers could hang as well. If it fails, nothing else would help.
        kill(Pid::this(), Signal::SIGKILL).ok();
    }
}
