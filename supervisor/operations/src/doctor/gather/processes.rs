//! Processes, as `/proc` shows them to this user.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;

/// The supervisor's name.
const SUPERVISOR: &str = "shadowslice";

/// How many ancestors of a process are looked at.
const MAX_ANCESTORS: usize = 16;

/// One process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Process {
    /// The file name of its program, as it was called.
    pub(super) name: String,
    pub(super) uid: u32,
    parent: i32,
}

/// All of them, by number.
pub(super) type Processes = BTreeMap<i32, Process>;

/// The processes that there are.
pub(super) fn all() -> Processes {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter_map(|pid| Some((pid, process(pid)?))).collect()
}

fn process(pid: i32) -> Option<Process> {
    let folder = format!("/proc/{pid}");
    let uid = fs::metadata(&folder).ok()?.uid();
    let stat = fs::read_to_string(format!("{folder}/stat")).ok()?;
    let arguments = fs::read(format!("{folder}/cmdline")).unwrap_or_default();
    parse(&stat, &arguments, uid)
}

/// From a line of `/proc/PID/stat`, in which the name may hold spaces and parentheses and is cut short, and from the
/// arguments, which processes of the kernel do not have.
fn parse(stat: &str, arguments: &[u8], uid: u32) -> Option<Process> {
    let (before, after) = stat.rsplit_once(')')?;
    let short = before.split_once('(')?.1;
    let parent = after.split_ascii_whitespace().nth(1)?.parse().ok()?;
    let program = arguments.split(|byte| *byte == 0).next().unwrap_or_default();
    let program = String::from_utf8_lossy(program);
    let name = program.rsplit('/').next().filter(|name| !name.is_empty()).unwrap_or(short);
    Some(Process { name: name.to_owned(), uid, parent })
}

/// Whether a running supervisor started it.
pub(super) fn is_our_own(pid: i32, processes: &Processes) -> bool {
    let parent = |pid: &i32| processes.get(pid).map(|process| process.parent);
    let line = std::iter::successors(Some(pid), parent).skip(1).take(MAX_ANCESTORS);
    line.filter_map(|pid| processes.get(&pid)).any(|process| process.name == SUPERVISOR)
}

/// A variable in the environment of a process, if this user may see it.
pub(super) fn variable(pid: i32, name: &str) -> Option<String> {
    let environment = fs::read(format!("/proc/{pid}/environ")).ok()?;
    let mut variables = environment.split(|byte| *byte == 0).map(String::from_utf8_lossy);
    variables.find_map(|variable| Some(variable.strip_prefix(name)?.strip_prefix('=')?.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_itself_and_who_started_it() {
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
        let parse = |arguments: &[u8]| parse("7 (nvidia-cuda-mps) S 3 7", arguments, 0).unwrap();
        assert_eq!(parse(b"/usr/bin/nvidia-cuda-mps-control\0-f\0").name, "nvidia-cuda-mps-control");
        assert_eq!((parse(b"").name.as_str(), parse(b"").parent), ("nvidia-cuda-mps", 3));
    }

    #[test]
    fn what_a_supervisor_started_through_others_is_its_own() {
        let process = |name: &str, parent| Process { name: name.to_owned(), uid: 0, parent };
        let all = Processes::from([
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
