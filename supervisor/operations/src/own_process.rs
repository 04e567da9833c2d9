//! Reads the CPU time, memory and open files of this process from `/proc`.

use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

use procfs::process::{LimitValue, Process};

/// The resources that this process uses. A field is `None` if `/proc` does not provide it.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ProcessUsage {
    /// The CPU time, in seconds.
    pub cpu_s: Option<f64>,
    /// The resident memory, in bytes.
    pub resident: Option<u64>,
    pub open_files: Option<u64>,
    pub max_open_files: Option<u64>,
    /// The start time, in seconds since 1970.
    pub started: Option<f64>,
}

/// A reader of this process's resource usage. It stores the values that do not change.
#[derive(Debug)]
pub struct OwnProcess {
    started: Option<f64>,
    max_open_files: Option<u64>,
}

impl OwnProcess {
    pub fn new() -> Self {
        let limits = Process::myself().and_then(|own| own.limits()).ok();
        let max_open_files = limits.and_then(|limits| match limits.max_open_files.soft_limit {
            LimitValue::Value(most) => Some(most),
            LimitValue::Unlimited => None,
        });
        let started = SystemTime::now().duration_since(UNIX_EPOCH).ok().map(|since| since.as_secs_f64());
        Self { started, max_open_files }
    }

    pub fn usage(&self) -> ProcessUsage {
        let stat = Process::myself().and_then(|own| own.stat()).ok();
        let ticks = procfs::ticks_per_second() as f64;
        ProcessUsage {
            cpu_s: stat.as_ref().map(|stat| (stat.utime + stat.stime) as f64 / ticks),
            resident: stat.as_ref().map(|stat| stat.rss * procfs::page_size()),
            open_files: open_files(),
            max_open_files: self.max_open_files,
            started: self.started,
        }
    }
}

impl Default for OwnProcess {
    fn default() -> Self {
        Self::new()
    }
}

/// Returns the number of open files without listing them. Since Linux 6.2, the size of the
/// directory `/proc/self/fd` is this number. Earlier versions return 0, so 0 counts as unknown.
fn open_files() -> Option<u64> {
    fs::metadata("/proc/self/fd").ok().map(|found| found.len()).filter(|count| *count > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_reads_its_own_usage() {
        let own = OwnProcess::new();
        let before = own.usage();
        assert!(before.resident.is_some_and(|bytes| bytes > 1 << 20), "{before:?}");
        assert!(before.started.is_some_and(|at| at > 1.7e9) && before.cpu_s.is_some(), "{before:?}");
        let files: Vec<_> = (0..20).map(|_| fs::File::open("/proc/self/stat").unwrap()).collect();
        if let (Some(before), Some(now)) = (before.open_files, own.usage().open_files) {
            assert!(now >= before + files.len() as u64 - 2, "{before} {now}");
        }
    }
}
