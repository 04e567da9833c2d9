//! The numbers of system calls, wake-ups and page faults, which `perf stat` counts at tracepoints.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use serde::Serialize;
use tokio::io::AsyncReadExt;
use tokio::process::{Child, Command};

use crate::MeasureError;

/// The folder in which the kernel lists its tracepoints for system calls.
const TRACEPOINTS: &str = "/sys/kernel/tracing/events/syscalls";

/// The system calls that are counted separately by name. All other system calls are counted
/// together.
const NAMES: [&str; 38] = [
    "accept4",
    "brk",
    "clock_gettime",
    "clock_nanosleep",
    "close",
    "epoll_ctl",
    "epoll_pwait",
    "epoll_wait",
    "fcntl",
    "futex",
    "getrandom",
    "madvise",
    "mmap",
    "mprotect",
    "mremap",
    "munmap",
    "openat",
    "poll",
    "ppoll",
    "pread64",
    "preadv",
    "pwrite64",
    "pwritev",
    "pwritev2",
    "read",
    "readv",
    "recvfrom",
    "recvmmsg",
    "recvmsg",
    "sched_yield",
    "sendmmsg",
    "sendmsg",
    "sendto",
    "shutdown",
    "splice",
    "timerfd_settime",
    "write",
    "writev",
];

const ALL: &str = "raw_syscalls:sys_enter";
const WAKE_UPS: &str = "sched:sched_wakeup";
const FAULTS: &str = "page-faults";

/// The numbers of system calls, wake-ups and page faults of one process.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct KernelCounts {
    /// The total number of system calls.
    pub(crate) all: u64,
    /// The number of calls of each system call in [`NAMES`]. System calls that were not called are
    /// omitted.
    pub(crate) by_name: BTreeMap<String, u64>,
    /// The number of times that this process woke a sleeping thread, of this or any other process.
    pub(crate) wake_ups: u64,
    pub(crate) faults: u64,
}

/// A running `perf stat` process.
pub(crate) struct PerfStat {
    child: Child,
    output: PathBuf,
}

/// Returns the reason why `perf stat` cannot count on this host, or `None` if it can.
pub(crate) async fn missing() -> Option<String> {
    let mut trial = Command::new("perf");
    trial.args(["stat", "-e", ALL, "true"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    match trial.status().await {
        Ok(status) if status.success() && Path::new(TRACEPOINTS).is_dir() => None,
        Ok(_) => Some("`perf stat` may not use tracepoints; run as root".into()),
        Err(_) => Some("`perf` is not installed (Debian package linux-perf)".into()),
    }
}

impl PerfStat {
    /// Starts to count for all threads of a process, and returns once the count has begun. `perf
    /// stat` counts until the command that it has started exits. This command is a shell that
    /// prints a line when it starts, and exits when its input ends.
    pub(crate) async fn begin(pid: i32, output: PathBuf) -> Result<Self, MeasureError> {
        let exists = |name: &&&str| Path::new(TRACEPOINTS).join(format!("sys_enter_{name}")).is_dir();
        let named = NAMES.iter().filter(exists).map(|name| format!("syscalls:sys_enter_{name}"));
        let events: Vec<String> =
            [ALL, WAKE_UPS, FAULTS].map(String::from).into_iter().chain(named).collect();
        let mut child = Command::new("perf")
            .args(["stat", "-x", ",", "-e", &events.join(","), "-p", &pid.to_string(), "-o"])
            .arg(&output)
            .args(["--", "sh", "-c", "echo begun; exec cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let begun = child.stdout.as_mut().ok_or("perf has no standard output")?.read_u8().await;
        begun.map_err(|_| "cannot start counting with perf stat")?;
        Ok(Self { child, output })
    }

    /// Stops the count, and returns the results.
    pub(crate) async fn end(mut self) -> Result<KernelCounts, MeasureError> {
        drop(self.child.stdin.take());
        if !self.child.wait().await?.success() {
            return Err("perf stat failed".into());
        }
        Ok(KernelCounts::parse(&fs::read_to_string(&self.output)?))
    }
}

impl KernelCounts {
    /// Reads lines of the form `count,unit,event,…`. An event that did not occur has the count
    /// `<not counted>`, which becomes 0.
    fn parse(text: &str) -> Self {
        let mut calls = Self::default();
        for line in text.lines() {
            let fields: Vec<&str> = line.split(',').collect();
            let [count, _, event, ..] = fields[..] else { continue };
            let count: u64 = count.parse().unwrap_or(0);
            match event {
                ALL => calls.all = count,
                WAKE_UPS => calls.wake_ups = count,
                FAULTS => calls.faults = count,
                _ => {
                    if let Some(name) = event.strip_prefix("syscalls:sys_enter_").filter(|_| count > 0) {
                        calls.by_name.insert(name.to_owned(), count);
                    }
                }
            }
        }
        calls
    }

    /// Returns the number of system calls that are not counted by name.
    pub(crate) fn others(&self) -> u64 {
        self.all.saturating_sub(self.by_name.values().sum())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_read_by_event() {
        let calls = KernelCounts::parse(
            "# started on a day\n\n12,,raw_syscalls:sys_enter,5,100.00,,\n<not counted>,,page-faults,0,100.00,,\n\
             3,,sched:sched_wakeup,5,100.00,,\n0,,syscalls:sys_enter_brk,5,1,,\n9,,syscalls:sys_enter_futex,5,100.00,,\n",
        );
        assert_eq!((calls.all, calls.wake_ups, calls.faults, calls.others()), (12, 3, 0, 3));
        assert_eq!(calls.by_name, BTreeMap::from([("futex".to_owned(), 9)]));
    }
}
