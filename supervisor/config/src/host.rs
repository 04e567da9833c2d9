//! Checks whether the host has the users, groups, cores and folders that a configuration names.

use std::cell::OnceCell;
use std::fs;
use std::ops::RangeInclusive;
use std::path::Path;

use nix::unistd::{Group, User};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AccountKind {
    User,
    Group,
}

impl AccountKind {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::User => "user",
            Self::Group => "group",
        }
    }
}

/// A function that returns the reason why a supervisor cannot use a run directory. Only `check`
/// needs this function, because `serve` locks the run directory itself.
pub type RunDirCheck<'a> = &'a dyn Fn(&Path) -> Option<String>;

/// The host of this process.
pub(super) struct Host<'a> {
    cores: OnceCell<Option<Vec<RangeInclusive<usize>>>>,
    /// The function that returns the reason why a supervisor cannot use a run directory.
    pub(super) refuses_run_dir: RunDirCheck<'a>,
}

impl<'a> Host<'a> {
    pub(super) fn new(refuses_run_dir: RunDirCheck<'a>) -> Self {
        Self { cores: OnceCell::new(), refuses_run_dir }
    }

    /// Returns whether the host has the account. If the lookup fails, returns true, and the
    /// supervisor reports the reason when it starts.
    pub(super) fn has_account(&self, kind: AccountKind, name: &str) -> bool {
        match kind {
            AccountKind::User => !matches!(User::from_name(name), Ok(None)),
            AccountKind::Group => !matches!(Group::from_name(name), Ok(None)),
        }
    }

    /// Returns the ranges of online cores in ascending order, or `None` if they are unknown.
    pub(super) fn cores(&self) -> Option<&[RangeInclusive<usize>]> {
        let read = || ranges(&fs::read_to_string("/sys/devices/system/cpu/online").ok()?);
        self.cores.get_or_init(read).as_deref()
    }

    /// Returns the reason why the supervisor cannot write a log to this file, or `None` if it can.
    pub(super) fn refuses_log(&self, path: &Path) -> Option<String> {
        if path.is_dir() {
            return Some(format!("{} is a folder; give a file in it", path.display()));
        }
        let folder = path.parent().filter(|folder| !folder.is_dir())?;
        Some(format!(
            "the folder {} does not exist; create it, and let the supervisor's user write to it",
            folder.display()
        ))
    }
}

/// Parses a list of ranges in the kernel's format, such as `0-3,8`.
fn ranges(text: &str) -> Option<Vec<RangeInclusive<usize>>> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        Some(first.parse().ok()?..=last.parse().ok()?)
    };
    text.trim().split(',').map(range).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_are_read_as_the_kernel_writes_them() {
        assert_eq!(ranges("0-3,8\n"), Some(vec![0..=3, 8..=8]));
        assert_eq!(ranges(""), None);
    }

    #[test]
    fn this_host_has_root_and_no_unknown_account() {
        let host = Host::new(&|_| None);
        for kind in [AccountKind::User, AccountKind::Group] {
            assert!(host.has_account(kind, "root") && !host.has_account(kind, "no-such-name"));
        }
    }

    #[test]
    fn a_log_is_a_file_in_an_existing_folder() {
        let (host, folder) = (Host::new(&|_| None), tempfile::tempdir().unwrap());
        assert_eq!(host.refuses_log(&folder.path().join("access.log")), None);
        let why = host.refuses_log(folder.path()).unwrap();
        assert!(why.ends_with("is a folder; give a file in it"), "{why}");
        let why = host.refuses_log(&folder.path().join("absent/access.log")).unwrap();
        assert!(why.contains("the folder") && why.contains("absent does not exist; create it"), "{why}");
    }
}
