//! The CPU priority of workers: a shadow starts below all that serve, and rises when it serves.

use nix::sys::resource::{Resource, getrlimit};
use nix::unistd::geteuid;
use rustix::process::{Pid, setpriority_pgrp};

pub(super) const LOWEST: i32 = 19;

pub(super) const NORMAL: i32 = 0;

/// `RLIMIT_NICE` counts from 20 downwards: a limit of 20 permits to come back to priority 0.
const LIMIT_FOR_NORMAL: u64 = 20;

/// Whether a lowered priority can be raised again on this host. If not, none is lowered.
pub fn may_raise_priority() -> bool {
    let limit = getrlimit(Resource::RLIMIT_NICE).map_or(0, |(soft, _)| soft);
    geteuid().is_root() || limit >= LIMIT_FOR_NORMAL
}

/// A worker's process group is its own, and all of its threads belong to it.
pub(super) fn set(pid: i32, priority: i32) {
    if let Err(error) = setpriority_pgrp(Pid::from_raw(pid), priority) {
        tracing::warn!(
            pid,
            priority,
            %error,
            "cannot set a worker's CPU priority; if the worker serves, its requests may be slow: set `LimitNICE=+0` in the unit"
        );
    }
}
