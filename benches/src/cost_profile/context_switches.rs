//! The number of context switches, which `/proc` reports for each thread.

use std::fs;
use std::ops::Sub;

use serde::Serialize;

/// The context switches of a process's threads, counted since each thread started. Threads that
/// have ended are not included.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(crate) struct ContextSwitches {
    /// The number of times that a thread went to sleep.
    pub(crate) voluntary: u64,
    /// The number of times that a thread was preempted.
    pub(crate) involuntary: u64,
}

impl ContextSwitches {
    /// Reads the context switches of all threads of these processes.
    pub(crate) fn of(pids: &[i32]) -> Self {
        let tasks = pids.iter().flat_map(|pid| fs::read_dir(format!("/proc/{pid}/task")));
        tasks.flatten().flatten().fold(Self::default(), |sum, task| {
            // If a thread has just ended, its status cannot be read, and the thread is skipped.
            let status = fs::read_to_string(task.path().join("status")).unwrap_or_default();
            let one = Self::parse(&status);
            Self { voluntary: sum.voluntary + one.voluntary, involuntary: sum.involuntary + one.involuntary }
        })
    }

    fn parse(status: &str) -> Self {
        let count = |name: &str| {
            let value = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            value.and_then(|value| value.trim().parse().ok()).unwrap_or(0)
        };
        Self { voluntary: count("voluntary_ctxt_switches"), involuntary: count("nonvoluntary_ctxt_switches") }
    }
}

impl Sub for ContextSwitches {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self {
            voluntary: self.voluntary.saturating_sub(earlier.voluntary),
            involuntary: self.involuntary.saturating_sub(earlier.involuntary),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_are_told_apart() {
        let status = "Name:\tx\nvoluntary_ctxt_switches:\t7\nnonvoluntary_ctxt_switches:\t3\n";
        assert_eq!(ContextSwitches::parse(status), ContextSwitches { voluntary: 7, involuntary: 3 });
    }
}
