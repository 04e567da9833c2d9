//! Processes as listed in `/proc`, with their descendants and their state.

use std::collections::HashSet;
use std::fs;

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// A process, which is identified by its PID and its start time. The PID alone is not sufficient,
/// because the system may reuse it later.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ProcessHandle {
    pub pid: i32,
    started: u64,
}

struct Stat {
    process: ProcessHandle,
    parent: i32,
    exited: bool,
}

impl ProcessHandle {
    /// Returns the running process with this PID.
    pub fn of(pid: i32) -> Option<Self> {
        stat(pid).filter(|stat| !stat.exited).map(|stat| stat.process)
    }

    /// Returns true if the process is still running. A zombie is not running.
    pub fn is_alive(self) -> bool {
        Self::of(self.pid) == Some(self)
    }

    /// Counts the open files of the process.
    pub fn open_files(self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.pid)).map_or(0, Iterator::count)
    }

    /// Returns the resident memory of the process, in bytes.
    pub fn memory(self) -> Option<u64> {
        self.bytes("VmRSS:")
    }

    /// Returns the peak resident memory of the process, in bytes.
    pub fn peak_memory(self) -> Option<u64> {
        self.bytes("VmHWM:")
    }

    fn bytes(self, key: &str) -> Option<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid)).ok()?;
        let found = status.lines().find_map(|line| line.strip_prefix(key))?;
        Some(found.trim().strip_suffix(" kB")?.parse::<u64>().ok()? * 1024)
    }

    /// Sends a signal if the process is still running.
    pub fn signal(self, signal: Signal) -> Result<(), Errno> {
        if self.is_alive() { kill(Pid::from_raw(self.pid), signal) } else { Err(Errno::ESRCH) }
    }
}

/// Returns all running descendants of a process.
pub fn descendants(pid: i32) -> Vec<ProcessHandle> {
    let all: Vec<Stat> = all().collect();
    let mut known = HashSet::from([pid]);
    // Children may be listed before their parents, so the loop repeats until it finds no more
    // processes.
    loop {
        let before = known.len();
        known.extend(
            all.iter().filter(|stat| known.contains(&stat.parent)).map(|s| s.process.pid).collect::<Vec<_>>(),
        );
        if known.len() == before {
            break;
        }
    }
    let found = all.iter().filter(|stat| !stat.exited && stat.process.pid != pid);
    found.map(|stat| stat.process).filter(|process| known.contains(&process.pid)).collect()
}

/// Counts the children of a process that have exited but are not reaped yet.
pub fn zombies(pid: i32) -> usize {
    all().filter(|stat| stat.exited && stat.parent == pid).count()
}

fn all() -> impl Iterator<Item = Stat> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| stat(entry.file_name().to_str()?.parse().ok()?))
}

fn stat(pid: i32) -> Option<Stat> {
    parse(pid, &fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// Parses a line of `/proc/PID/stat`. The command's name may contain spaces and parentheses.
fn parse(pid: i32, line: &str) -> Option<Stat> {
    let fields: Vec<&str> = line.rsplit_once(')')?.1.split_ascii_whitespace().collect();
    Some(Stat {
        process: ProcessHandle { pid, started: fields.get(19)?.parse().ok()? },
        parent: fields.get(1)?.parse().ok()?,
        // A zombie with other threads is still exiting, and keeps its files open until the last
        // thread has exited.
        exited: matches!(*fields.first()?, "Z" | "X") && fields.get(17)?.parse::<u32>().ok()? <= 1,
    })
}

#[cfg(test)]
mod tests {
    use std::process::{self, Command, Stdio};

    use super::*;

    #[test]
    fn a_child_is_found_and_its_exit_is_noticed() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let own = i32::try_from(process::id()).unwrap();
        let found = descendants(own).into_iter().find(|process| process.pid == pid).unwrap();
        assert!(found.is_alive());
        found.signal(Signal::SIGKILL).unwrap();
        child.wait().unwrap();
        assert!(!found.is_alive());
        assert_eq!(found.signal(Signal::SIGKILL), Err(Errno::ESRCH));
    }

    #[test]
    fn names_may_contain_spaces_and_parentheses() {
        let line = "7 (a) b (c) S 3 7 7 0 -1 4 0 0 0 0 0 0 0 0 20 0 1 0 4711 0 0";
        let stat = parse(7, line).unwrap();
        assert_eq!((stat.parent, stat.process.started, stat.exited), (3, 4711, false));
    }
}
