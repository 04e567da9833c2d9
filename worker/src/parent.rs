//! Ends a worker when its supervisor has exited.
//!
//! A worker that waits for batches detects that its sockets are closed. A worker whose model hangs
//! does not detect this, so a separate thread watches the supervisor's process.

use std::io;
use std::os::fd::OwnedFd;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{PidfdFlags, getppid, pidfd_open};

/// The time that a worker gets to exit normally after its supervisor has exited. In this time, a
/// batch on the GPU can end, and the model can run its exit handlers.
const EXIT_TIMEOUT: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };

/// The process that started this process.
#[derive(Debug)]
pub(crate) struct ParentProcess {
    pid: rustix::process::Pid,
    /// A descriptor that becomes readable when the parent process exits.
    ended: OwnedFd,
}

impl ParentProcess {
    /// Returns the parent process, or `None` if the parent is in another PID namespace and
    /// therefore not visible.
    pub(crate) fn find() -> io::Result<Option<Self>> {
        let Some(pid) = getppid() else { return Ok(None) };
        Ok(Some(Self { pid, ended: pidfd_open(pid, PidfdFlags::empty())? }))
    }

    /// Starts a thread that kills this process after its parent has exited. Call this after
    /// [`crate::sandbox::enter`]. The sandbox covers only the calling thread and threads that start
    /// later, and a model can make any thread run its code.
    pub(crate) fn exit_with_parent(self) -> io::Result<()> {
        std::thread::Builder::new().name("parent".to_owned()).spawn(move || self.watch()).map(drop)
    }

    fn watch(&self) {
        while poll(&mut [PollFd::new(&self.ended, PollFlags::IN)], None) == Err(Errno::INTR) {}
        if getppid() == Some(self.pid) {
            // The model has closed descriptors that it does not own, so this thread cannot watch
            // the parent.
            return;
        }
        // The error is ignored, because a signal can only shorten this wait.
        poll(&mut [], Some(&EXIT_TIMEOUT)).ok();
        // SIGKILL is needed, because exit handlers could also hang. An error is ignored, because no
        // other call could end the process.
        kill(Pid::this(), Signal::SIGKILL).ok();
    }
}
