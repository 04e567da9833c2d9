//! Lists the processes that this user can see in `/proc`.

use std::collections::BTreeMap;

const SUPERVISOR: &str = "shadowslice";

const MAX_ANCESTORS: usize = 16;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ProcessEntry {
    /// The program's file name, taken from the process's arguments.
    pub(super) name: String,
    pub(super) uid: u32,
    parent: i32,
}

/// All visible processes by process id.
pub(super) type ProcessTable = BTreeMap<i32, ProcessEntry>;

pub(super) fn all() -> ProcessTable {
    let all = procfs::process::all_processes().into_iter().flatten().flatten();
    all.filter_map(|process| Some((process.pid, entry(&process)?))).collect()
}

fn entry(process: &procfs::process::Process) -> Option<ProcessEntry> {
    let stat = process.stat().ok()?;
    let arguments = process.cmdline().unwrap_or_default();
    let name = name(arguments.first().map_or("", String::as_str), &stat.comm).to_owned();
    Some(ProcessEntry { name, uid: process.uid().ok()?, parent: stat.ppid })
}

/// Returns the program's file name. `short` is the truncated name in `/proc/PID/stat`. It is used
/// only for kernel threads, which have no arguments.
fn name<'n>(program: &'n str, short: &'n str) -> &'n str {
    program.rsplit('/').next().filter(|name| !name.is_empty()).unwrap_or(short)
}

/// Returns whether a running supervisor is an ancestor of the process.
pub(super) fn is_our_own(pid: i32, processes: &ProcessTable) -> bool {
    let parent = |pid: &i32| processes.get(pid).map(|process| process.parent);
    let line = std::iter::successors(Some(pid), parent).skip(1).take(MAX_ANCESTORS);
    line.filter_map(|pid| processes.get(&pid)).any(|process| process.name == SUPERVISOR)
}

pub(super) fn variable(pid: i32, name: &str) -> Option<String> {
    let mut environment = procfs::process::Process::new(pid).ok()?.environ().ok()?;
    Some(environment.remove(std::ffi::OsStr::new(name))?.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_itself_and_its_parent() {
        let own = i32::try_from(std::process::id()).unwrap();
        let all = all();
        let me = &all[&own];
        assert_eq!(me.uid, nix::unistd::geteuid().as_raw());
        assert_eq!(me.parent, i32::try_from(std::os::unix::process::parent_id()).unwrap());
        assert!(!is_our_own(own, &all));
        assert!(variable(own, "PATH").is_some());
        assert_eq!(variable(own, "PAT"), None);
    }

    #[test]
    fn a_long_name_comes_from_the_arguments() {
        assert_eq!(name("/usr/bin/nvidia-cuda-mps-control", "nvidia-cuda-mps"), "nvidia-cuda-mps-control");
        assert_eq!(name("", "kworker/0:1"), "kworker/0:1");
    }

    #[test]
    fn descendants_of_a_supervisor_are_its_own() {
        let process = |name: &str, parent| ProcessEntry { name: name.to_owned(), uid: 0, parent };
        let all = ProcessTable::from([
            (1, process("init", 0)),
            (2, process("shadowslice", 1)),
            (3, process("nvidia-cuda-mps-control", 2)),
            (4, process("nvidia-cuda-mps-server", 3)),
            (5, process("nvidia-cuda-mps-control", 1)),
            (6, process("loop", 6)),
        ]);
        assert_eq!([3, 4, 5, 6, 7].map(|pid| is_our_own(pid, &all)), [true, true, false, false, false]);
    }
}
