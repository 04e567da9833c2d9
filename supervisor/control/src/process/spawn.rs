//! Child processes that inherit only the descriptors that they are given.
#![allow(unsafe_code)] // This module marks and watches descriptors, and tests observe forks.

use std::ffi::{CString, OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;

use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use nix::spawn::{PosixSpawnAttr, PosixSpawnFileActions, PosixSpawnFlags, posix_spawn};
use nix::sys::signal::{SigSet, Signal, kill};
use rustix::process::{Pid, PidfdFlags, WaitOptions, pidfd_open, pidfd_send_signal, waitpid};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::orphans::{disown, own};

/// A descriptor that a child inherits, with the number that the child expects.
#[derive(Debug, Clone, Copy)]
pub struct InheritedFile<'f> {
    pub number: RawFd,
    pub file: BorrowedFd<'f>,
}

/// A child process. Dropping this kills the process.
#[derive(Debug)]
pub struct Child {
    pid: Pid,
    /// The pidfd, which is readable after the process has exited.
    process: AsyncFd<OwnedFd>,
    status: Option<ExitStatus>,
    free: bool,
}

impl Child {
    pub fn pid(&self) -> i32 {
        self.pid.as_raw_nonzero().get()
    }

    /// Waits until the process exits. This function is cancel-safe.
    pub async fn wait(&mut self) -> io::Result<ExitStatus> {
        loop {
            if let Some(status) = self.status {
                return Ok(status);
            }
            let mut ended = self.process.readable().await?;
            match waitpid(Some(self.pid), WaitOptions::NOHANG)? {
                Some((_, status)) => self.status = Some(ExitStatus::from_raw(status.as_raw())),
                None => ended.clear_ready(),
            }
        }
    }

    pub fn kill(&self) -> io::Result<()> {
        if self.status.is_some() {
            return Ok(());
        }
        Ok(pidfd_send_signal(&self.process, rustix::process::Signal::KILL)?)
    }

    /// Lets the process continue after this is dropped.
    pub fn set_free(&mut self) {
        self.free = true;
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if self.status.is_none() {
            disown(self.pid());
        }
        if self.free {
            return;
        }
        // An error means that the process has exited.
        self.kill().ok();
    }
}

/// Starts a child process in its own process group, with exactly this environment and these files,
/// an empty standard input, and the outputs of this process. The start does not use `fork`: after a
/// `fork`, this process would copy each page at the next write, which would delay requests.
pub fn spawn(
    program: &Path,
    arguments: &[&str],
    environment: &[(OsString, OsString)],
    files: &[InheritedFile<'_>],
) -> io::Result<Child> {
    close_on_exec()?;
    // The number of one file can be the source of another one, so all sources have higher numbers.
    let above = files.iter().map(|file| file.number + 1).max().unwrap_or_default();
    let aside = |file: &InheritedFile<'_>| rustix::io::fcntl_dupfd_cloexec(file.file, above);
    let sources = files.iter().map(aside).collect::<Result<Vec<OwnedFd>, _>>()?;
    let mut actions = PosixSpawnFileActions::init()?;
    let nothing = File::open("/dev/null")?;
    actions.add_dup2(nothing.as_raw_fd(), libc::STDIN_FILENO)?;
    for (file, source) in files.iter().zip(&sources) {
        actions.add_dup2(source.as_raw_fd(), file.number)?;
    }
    let named = text(original_path(program).as_os_str())?;
    let program = text(program.as_os_str())?;
    let arguments = arguments.iter().map(|argument| text(OsStr::new(argument)));
    let arguments = std::iter::once(Ok(named)).chain(arguments).collect::<io::Result<Vec<CString>>>()?;
    let variable = |(name, value): &(OsString, OsString)| {
        let mut variable = name.clone();
        variable.push("=");
        variable.push(value);
        text(&variable)
    };
    let environment = environment.iter().map(variable).collect::<io::Result<Vec<CString>>>()?;
    let attributes = attributes()?;
    let start = || Ok(posix_spawn(program.as_c_str(), &actions, &attributes, &arguments, &environment)?);
    let started = own(start, |pid| Some(pid.as_raw()))?;
    let pid = Pid::from_raw(started.as_raw()).ok_or(io::ErrorKind::Other)?;
    let process = watch(started.as_raw()).inspect_err(|_| {
        // Nothing would notice the exit of an unwatched child. An error means that it has exited.
        kill(started, Signal::SIGKILL).ok();
        nix::sys::wait::waitpid(started, None).ok();
    })?;
    Ok(Child { pid, process, status: None, free: false })
}

/// Returns the original path of a program that this process holds open, or otherwise `program`.
fn original_path(program: &Path) -> PathBuf {
    let held = program.starts_with(OPEN_FILES).then(|| fs::read_link(program).ok()).flatten();
    held.unwrap_or_else(|| program.to_owned())
}

/// The folder that lists the open files of a process.
const OPEN_FILES: &str = "/proc/self/fd";

/// The lowest number for the descriptor of a held program, above all numbers that children expect.
const MIN_HELD_NUMBER: RawFd = 64;

/// Returns a path that refers to this program even if the file is replaced while this process runs.
/// Returns the path of a script unchanged, because its interpreter opens the path again.
pub fn held(program: &Path) -> io::Result<PathBuf> {
    let mut file = File::open(program)?;
    let mut magic = [0; 4];
    if file.read_exact(&mut magic).is_err() || magic != *b"\x7fELF" {
        return Ok(program.to_owned());
    }
    // The descriptor stays open while this process runs.
    let number = fcntl(&file, FcntlArg::F_DUPFD_CLOEXEC(MIN_HELD_NUMBER))?;
    Ok(Path::new(OPEN_FILES).join(number.to_string()))
}

/// Returns a descriptor that becomes readable when the process exits.
pub(crate) fn watch(pid: i32) -> io::Result<AsyncFd<OwnedFd>> {
    let pid = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
    let process = pidfd_open(pid, PidfdFlags::empty())?;
    // SAFETY: the `AsyncFd` owns the descriptor, and never replaces it or gives it away.
    Ok(unsafe { AsyncFd::register_with_interest(process, Interest::READABLE) }?)
}

fn attributes() -> io::Result<PosixSpawnAttr> {
    let mut attributes = PosixSpawnAttr::init()?;
    attributes.set_pgroup(nix::unistd::Pid::from_raw(0))?;
    attributes.set_sigmask(&SigSet::empty())?;
    attributes.set_sigdefault(&SigSet::from(Signal::SIGPIPE))?;
    attributes.set_flags(
        PosixSpawnFlags::POSIX_SPAWN_SETPGROUP
            | PosixSpawnFlags::POSIX_SPAWN_SETSIGMASK
            | PosixSpawnFlags::POSIX_SPAWN_SETSIGDEF,
    )?;
    Ok(attributes)
}

fn text(text: &OsStr) -> io::Result<CString> {
    CString::new(text.as_bytes()).map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))
}

/// Marks all descriptors except the standard streams as close-on-exec, including those that a
/// library did not mark. Call this before a [`Command`](std::process::Command) starts, and not in
/// its `pre_exec`, because a command with a `pre_exec` starts with a `fork`.
pub(crate) fn close_on_exec() -> io::Result<()> {
    let flag = libc::c_int::try_from(libc::CLOSE_RANGE_CLOEXEC).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: the call only sets a flag on descriptors, which stay open.
    let marked = unsafe { libc::close_range(3, libc::c_uint::MAX, flag) };
    if marked < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
pub(crate) mod forks {
    use std::cell::Cell;
    use std::sync::Once;

    use nix::libc;

    thread_local! {
        static SEEN: Cell<usize> = const { Cell::new(0) };
    }

    /// Returns the number of forks of this thread since its first call of this function.
    pub(crate) fn seen() -> usize {
        static HEAR: Once = Once::new();
        // SAFETY: the function that runs before each fork only increases a thread-local number.
        HEAR.call_once(|| assert_eq!(unsafe { libc::pthread_atfork(Some(count), None, None) }, 0));
        SEEN.get()
    }

    unsafe extern "C" fn count() {
        SEEN.set(SEEN.get() + 1);
    }

    #[test]
    fn a_fork_is_seen() {
        let before = seen();
        let mut command = std::process::Command::new("true");
        // SAFETY: nothing is done between fork and exec.
        unsafe { std::os::unix::process::CommandExt::pre_exec(&mut command, || Ok(())) };
        command.status().unwrap();
        assert_eq!(seen(), before + 1);
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::process::Command;

    use super::*;

    /// Returns a descriptor without the close-on-exec flag, which leaks unless it is marked.
    fn leak() -> OwnedFd {
        let leak = nix::unistd::dup(std::fs::File::open("/dev/full").unwrap()).unwrap();
        nix::fcntl::fcntl(&leak, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::empty())).unwrap();
        leak
    }

    /// Returns the exit status of a shell that runs this script in this environment.
    async fn ended(
        script: &str,
        environment: &[(&str, &str)],
        files: &[(BorrowedFd<'_>, RawFd)],
    ) -> ExitStatus {
        let own = |(name, value): &(&str, &str)| (OsString::from(name), OsString::from(value));
        let environment: Vec<_> = environment.iter().map(own).collect();
        let files: Vec<_> = files.iter().map(|&(file, number)| InheritedFile { number, file }).collect();
        spawn(Path::new("/bin/sh"), &["-c", script], &environment, &files).unwrap().wait().await.unwrap()
    }

    #[tokio::test]
    async fn a_child_has_the_named_descriptors_and_no_others() {
        let null = std::fs::File::open("/dev/null").unwrap();
        let zero = std::fs::File::open("/dev/zero").unwrap();
        let _leak = leak();
        // Only builtins: a pipe or a substitution takes free numbers of the shell itself for a
        // moment.
        let script = "cd /proc/$$/fd && test 0 -ef /dev/null && test 3 -ef /dev/zero && test 5 -ef /dev/null && \
            for n in 4 6 7 8 9; do ! test -e $n || exit 1; done";
        let status =
            ended(script, &[("PATH", "/usr/bin:/bin")], &[(null.as_fd(), 5), (zero.as_fd(), 3)]).await;
        assert!(status.success(), "{status}");
    }

    #[tokio::test]
    async fn numbers_may_be_each_others_sources() {
        let null = std::fs::File::open("/dev/null").unwrap();
        let zero = std::fs::File::open("/dev/zero").unwrap();
        let (one, other) = (null.as_raw_fd(), zero.as_raw_fd());
        let script = format!(
            "test \"$(readlink /proc/$$/fd/{other})\" = /dev/null && test \"$(readlink /proc/$$/fd/{one})\" = /dev/zero"
        );
        let files = [(null.as_fd(), other), (zero.as_fd(), one)];
        assert!(ended(&script, &[("PATH", "/usr/bin:/bin")], &files).await.success());
    }

    #[tokio::test]
    async fn a_child_has_its_environment_and_its_own_group_and_dies_of_a_closed_pipe() {
        let script = "test $A = b && test -z \"$CARGO\" && test $(cut -d' ' -f5 /proc/$$/stat) = $$";
        assert!(ended(script, &[("PATH", "/usr/bin:/bin"), ("A", "b")], &[]).await.success());
        let status = ended("kill -PIPE $$", &[], &[]).await;
        assert_eq!(status.signal(), Some(libc::SIGPIPE));
    }

    #[tokio::test]
    async fn what_cannot_be_started_is_said() {
        let missing = spawn(Path::new("/nowhere/program"), &[], &[], &[]).unwrap_err();
        assert_eq!(missing.kind(), io::ErrorKind::NotFound);
        let odd = spawn(Path::new("/bin/true"), &["a\0b"], &[], &[]).unwrap_err();
        assert_eq!(odd.kind(), io::ErrorKind::InvalidInput);
    }

    #[tokio::test]
    async fn a_child_ends_when_it_is_killed_or_dropped() {
        let sleeping = || spawn(Path::new("/bin/sleep"), &["1000"], &[], &[]).unwrap();
        let mut killed = sleeping();
        killed.kill().unwrap();
        assert_eq!(killed.wait().await.unwrap().signal(), Some(libc::SIGKILL));
        killed.kill().unwrap();
        assert_eq!(killed.wait().await.unwrap().signal(), Some(libc::SIGKILL), "it is still known");

        let dropped = sleeping();
        let pid = dropped.pid;
        drop(dropped);
        let (_, status) = waitpid(Some(pid), WaitOptions::empty()).unwrap().unwrap();
        assert_eq!(status.terminating_signal(), Some(libc::SIGKILL));
    }

    #[test]
    fn a_command_passes_nothing_on() {
        let _leak = leak();
        close_on_exec().unwrap();
        let script = "for n in 3 4 5 6 7 8 9; do readlink /proc/$$/fd/$n; done; true";
        let said = Command::new("sh").args(["-c", script]).output().unwrap();
        assert_eq!(String::from_utf8(said.stdout).unwrap(), "");
    }
}
