//! Ends a worker when its supervisor has exited.
//!
//! A worker that waits for batches detects that its sockets are closed. A worker whose model hangs
//! does not detect this, so a separate thread watches the supervisor's process.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, getppid};
use rustix::process::{PidfdFlags, pidfd_open};

/// The time in ms that a worker gets to exit normally after its supervisor has exited. In it, a
/// batch on the GPU can end, and the model can run its exit handlers.
const EXIT_TIMEOUT_MS: u16 = 5000;

/// The process that started this process.
#[derive(Debug)]
pub(crate) struct ParentProcess {
    pid: Pid,
    /// A descriptor that becomes readable when the parent process exits.
    ended: OwnedFd,
}

impl ParentProcess {
    /// Returns the parent process, or `None` if the parent is in another PID namespace and
    /// therefore not visible.
    pub(crate) fn find() -> io::Result<Option<Self>> {
        let pid = getppid();
        let Some(visible) = rustix::process::Pid::from_raw(pid.as_raw()) else { return Ok(None) };
        Ok(Some(Self { pid, ended: pidfd_open(visible, PidfdFlags::empty())? }))
    }

    /// Starts a thread that kills this process after its parent has exited. Call this after
    /// [`crate::sandbox::enter`]. The sandbox covers only the calling thread and threads that start
    /// later, and a model can make any thread run its code.
    pub(crate) fn exit_with_parent(self) -> io::Result<()> {
        std::thread::Builder::new().name("parent".to_owned()).spawn(move || self.watch()).map(drop)
    }

    fn watch(&self) {
        let mut ended = [PollFd::new(self.ended.as_fd(), PollFlags::POLLIN)];
        while poll(&mut ended, PollTimeout::NONE) == Err(Errno::EINTR) {}
        if getppid() == self.pid {
            // The model has closed descriptors that it does not own, so this thread cannot watch
            // the parent.
            return;
        }
        // The error is ignored, because a signal can only shorten this wait.
        poll(&mut [], EXIT_TIMEOUT_MS).ok();
        // SIGKILL is needed, because exit handlers could also hang. An error is ignored, because no
        // other call could end the process.
        kill(Pid::this(), Signal::SIGKILL).ok();
    }
}
