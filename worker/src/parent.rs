//! The end of the supervisor, which ends its workers, too.
//!
//! A worker that waits finds its sockets closed. One whose model hangs does not, so a thread watches.

use std::io;
use std::os::fd::OwnedFd;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{PidfdFlags, getppid, pidfd_open};

/// How long after the supervisor's end a worker may take to end by itself: for a batch on the GPU, and
/// for what a model does at its end.
const END_WITHIN: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };

/// The process that has started this one.
#[derive(Debug)]
pub(crate) struct ParentProcess {
    pid: rustix::process::Pid,
    /// Readable once it has ended.
    ended: OwnedFd,
}

impl ParentProcess {
    /// `None` if it is out of sight, in another PID namespace.
    pub(crate) fn find() -> io::Result<Option<Self>> {
        let Some(pid) = getppid() else { return Ok(None) };
        Ok(Some(Self { pid, ended: pidfd_open(pid, PidfdFlags::empty())? }))
    }

    /// Ends this process after the parent. Only once the walls stand: they hold for the thread that
    /// raises them and for those that it starts later, and the model can have any thread run its
    /// code.
    pub(crate) fn end_with_it(self) -> io::Result<()> {
        std::thread::Builder::new().name("parent".to_owned()).spawn(move || self.watch()).map(drop)
    }

    fn watch(&self) {
        while poll(&mut [PollFd::new(&self.ended, PollFlags::IN)], None) == Err(Errno::INTR) {}
        if getppid() == Some(self.pid) {
            // The model has closed descriptors that are not its own.
            return;
        }
        poll(&mut [], Some(&END_WITHIN)).ok();
        // Handlers that run at an exit might hang as well.
        kill(Pid::this(), Signal::SIGKILL).ok();
    }
}
