//! A child that inherits the descriptors it is given, and no others.
#![allow(unsafe_code)] // what runs between fork and exec

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::process::Command;

use nix::libc;

/// A descriptor that a child inherits, under the number it expects.
#[derive(Debug, Clone, Copy)]
pub struct Inherited<'f> {
    /// The child's number for it.
    pub number: RawFd,
    /// The file.
    pub file: BorrowedFd<'f>,
}

/// The lowest number that is free for moving descriptors out of each other's way: above every
/// number that a child expects.
const ASIDE: RawFd = 32;

/// Makes `command` pass exactly `files`, besides the standard streams. They must stay open until
/// the child is spawned.
pub(crate) fn inherit(command: &mut Command, files: &[Inherited<'_>]) {
    let moves: Vec<(RawFd, RawFd)> = files.iter().map(|file| (file.file.as_raw_fd(), file.number)).collect();
    let mut aside = vec![0; moves.len()];
    let between = move || place(&moves, &mut aside);
    // SAFETY: `place` makes system calls that are async-signal-safe and neither allocates nor locks.
    unsafe { std::os::unix::process::CommandExt::pre_exec(command, between) };
}

/// Marks everything close-on-exec, then copies each file to its number. Copies go through high
/// numbers first, as one file's number can be another's source.
fn place(moves: &[(RawFd, RawFd)], aside: &mut [RawFd]) -> io::Result<()> {
    let flag = libc::c_int::try_from(libc::CLOSE_RANGE_CLOEXEC).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: a flag on descriptors of this child only; nothing is closed before exec.
    check(unsafe { libc::close_range(3, libc::c_uint::MAX, flag) })?;
    for ((source, _), aside) in moves.iter().zip(&mut *aside) {
        // SAFETY: duplicating a descriptor touches no memory.
        *aside = check(unsafe { libc::fcntl(*source, libc::F_DUPFD_CLOEXEC, ASIDE) })?;
    }
    for ((_, number), aside) in moves.iter().zip(aside) {
        // SAFETY: as above; what stood at `number` is a copy of the parent's that this child does not need.
        check(unsafe { libc::dup2(*aside, *number) })?;
    }
    Ok(())
}

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_child_has_the_named_descriptors_and_no_others() {
        let null = std::fs::File::open("/dev/null").unwrap();
        let zero = std::fs::File::open("/dev/zero").unwrap();
        // One that leaks unless it is marked: a duplicate without the flag.
        let leak = nix::unistd::dup(&zero).unwrap();
        nix::fcntl::fcntl(&leak, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::empty())).unwrap();
        let mut command = Command::new("readlink");
        command.args((3..ASIDE).map(|number| format!("/proc/self/fd/{number}")));
        let files = [(null.as_fd(), 5), (zero.as_fd(), 3)];
        inherit(&mut command, &files.map(|(file, number)| Inherited { number, file }));
        let seen = String::from_utf8(command.output().unwrap().stdout).unwrap();
        assert_eq!(seen, "/dev/zero\n/dev/null\n");
    }
}
