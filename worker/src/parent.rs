//! The end of the supervisor, which ends its workers, too.
//!
//! A worker that waits finds its sockets closed. One whose model hangs does not, so a thread watches.

use std::io;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{PidfdFlags, getppid, pidfd_open};

/// How long after the supervisor's end a worker may take to end by itself: for a batch on the GPU, and
/// for what a model does at its end.
const END_WITHIN: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };

/// Ends this process after the one that has started it.
pub(crate) fn end_with_it() -> io::Result<()> {
    let Some(parent) = getppid() else { return Ok(()) };
    let ended = pidfd_open(parent, PidfdFlags::empty())?;
    let watch = move || {
        while poll(&mut [PollFd::new(&ended, PollFlags::IN)], None) == Err(Errno::INTR) {}
        if getppid() == Some(parent) {
            // The model has closed descriptors that are not its own.
            return;
        }
        poll(&mut [], Some(&END_WITHIN)).ok();
        // Handlers that run at an exit might hang as well.
        kill(Pid::this(), Signal::SIGKILL).ok();
    };
    std::thread::Builder::new().name("parent".to_owned()).spawn(watch).map(drop)
}
