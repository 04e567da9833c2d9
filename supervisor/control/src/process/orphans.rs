//! Reaps orphans if this process is their parent: as process 1 of a container, or as a subreaper.
//! No other process waits for them, and zombies would fill the process table.
//!
//! The reaper does not reap children that this process has started itself, because other code waits
//! for them. [`own`] registers each of them under the reaper's lock, so that the reaper never
//! mistakes a short-lived child for an orphan.

use std::collections::BTreeSet;
use std::io;
use std::sync::OnceLock;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::prctl::get_child_subreaper;
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid, waitpid};
use nix::unistd::Pid;
use parking_lot::Mutex;

/// The time between two checks for exited children. This process's own children remain until other
/// code waits for them, which happens soon.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// The time until the next check if this process has no children.
const IDLE_INTERVAL: Duration = Duration::from_secs(1);

/// The children that this process has started, or empty if this process does not reap.
static OWN: OnceLock<Mutex<BTreeSet<i32>>> = OnceLock::new();

/// Starts the reaper if orphans become children of this process. Call this before this process
/// starts any child.
pub fn reap_orphans() {
    if std::process::id() != 1 && !get_child_subreaper().unwrap_or(false) {
        return;
    }
    OWN.get_or_init(Mutex::default);
    let thread = std::thread::Builder::new().name("orphans".to_owned()).spawn(reap_forever);
    if let Err(error) = thread {
        tracing::warn!(
            %error,
            "cannot start the thread that reaps orphans, so zombie processes will remain; raise the limit on processes"
        );
    }
}

/// Starts a child with `start`, and registers the process ID that `pid` returns, so that the reaper
/// ignores the child.
pub(crate) fn own<C>(
    start: impl FnOnce() -> io::Result<C>,
    pid: impl FnOnce(&C) -> Option<i32>,
) -> io::Result<C> {
    let mut own = OWN.get().map(Mutex::lock);
    let child = start()?;
    if let (Some(own), Some(pid)) = (&mut own, pid(&child)) {
        own.insert(pid);
    }
    Ok(child)
}

/// Leaves a child to the reaper, because no code waits for it any more.
pub(crate) fn disown(pid: i32) {
    if let Some(own) = OWN.get() {
        own.lock().remove(&pid);
    }
}

#[allow(clippy::disallowed_methods)] // The kernel reports exited children until something waits for them.
fn reap_forever() {
    let ended = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT;
    loop {
        match waitid(Id::All, ended) {
            Ok(first) => {
                if let Some(own) = OWN.get() {
                    reap(&mut own.lock(), first.pid());
                }
                std::thread::sleep(CHECK_INTERVAL);
            }
            // The most likely reason is that this process has no children.
            Err(_) => std::thread::sleep(IDLE_INTERVAL),
        }
    }
}

/// Reaps each exited child that this process has not started. `first` has exited.
fn reap(own: &mut BTreeSet<i32>, first: Option<Pid>) {
    let look = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT | WaitPidFlag::WNOHANG;
    // An orphan can later get the process ID of a child that was reaped.
    own.retain(|&pid| waitid(Id::Pid(Pid::from_raw(pid)), look) != Err(Errno::ECHILD));
    for pid in children().into_iter().chain(first).filter(|pid| !own.contains(&pid.as_raw())) {
        if let Ok(WaitStatus::Exited(..) | WaitStatus::Signaled(..)) =
            waitpid(pid, Some(WaitPidFlag::WNOHANG))
        {
            tracing::debug!(pid = pid.as_raw(), "reaped an orphan");
        }
    }
}

/// Returns the children of all threads, as far as the kernel lists them.
fn children() -> BTreeSet<Pid> {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let lists = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
    let pids = |list: String| list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>();
    lists.flat_map(pids).map(Pid::from_raw).collect()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn of_children_that_have_ended_only_those_of_others_are_reaped() {
        let mut started = Command::new("sh").args(["-c", "exit 7"]).spawn().unwrap();
        let mut other = Command::new("true").spawn().unwrap();
        let [kept, orphan] = [&started, &other].map(|child| Pid::from_raw(child.id().cast_signed()));
        let look = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT;
        for child in [kept, orphan] {
            waitid(Id::Pid(child), look).unwrap();
        }
        // Other tests of this process have children, too.
        let mut own = children().into_iter().map(Pid::as_raw).collect::<BTreeSet<_>>();
        own.remove(&orphan.as_raw());
        own.insert(kept.as_raw());
        reap(&mut own, Some(kept));
        reap(&mut own, Some(orphan));
        assert!(other.wait().is_err(), "it was waited for");
        assert_eq!(started.wait().unwrap().code(), Some(7), "its status is still there");
        reap(&mut own, None);
        assert!(!own.contains(&kept.as_raw()), "the child was reaped");
    }
}
