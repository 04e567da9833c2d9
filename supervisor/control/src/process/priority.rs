//! The CPU priority of workers. A shadow starts with the lowest priority, and gets the normal
//! priority when it serves.

use nix::sys::resource::{Resource, getrlimit};
use nix::unistd::geteuid;
use rustix::process::{Pid, setpriority_pgrp, setpriority_process};

pub(super) const LOWEST: i32 = 19;

pub(super) const NORMAL: i32 = 0;

/// The limit `RLIMIT_NICE` that permits a return to priority 0. The limit counts from 20 downwards.
const LIMIT_FOR_NORMAL: u64 = 20;

/// Returns true if this process can raise a lowered priority again. Otherwise, it lowers none.
pub fn may_raise_priority() -> bool {
    let limit = getrlimit(Resource::RLIMIT_NICE).map_or(0, |(soft, _)| soft);
    geteuid().is_root() || limit >= LIMIT_FOR_NORMAL
}

/// Sets the CPU priority of a worker's process group, which contains all of its threads.
pub(super) fn set(pid: i32, priority: i32) {
    log_failure(pid, priority, setpriority_pgrp(Pid::from_raw(pid), priority));
}

/// Sets the CPU priority of one thread.
pub(super) fn set_thread(thread: i32, priority: i32) {
    // On Linux, the priority belongs to a thread, whose id is in the place of a process id.
    log_failure(thread, priority, setpriority_process(Pid::from_raw(thread), priority));
}

fn log_failure(pid: i32, priority: i32, result: rustix::io::Result<()>) {
    if let Err(error) = result {
        tracing::warn!(
            pid,
            priority,
            %error,
            "cannot set a worker's CPU priority; if the worker serves, its requests may be slow: set `LimitNICE=+0` in the unit"
        );
    }
}
