//! The run directory with the sockets and the private files. Only this user can write to it. In a
//! folder that others can write to, a link could lead the supervisor to any file.

use std::fs::{DirBuilder, File, OpenOptions, Permissions, set_permissions, symlink_metadata};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;
use nix::unistd::{AccessFlags, eaccess, geteuid};
use shadowslice_config::{CONTROL_SOCKET, PRIVATE};

/// The name of the folder that workers of other users can enter.
const PASSABLE: &str = "workers";

/// The name of the lock file in the private folder.
const LOCK: &str = "lock";

/// The mode bits that permit the group or all others to write.
const OTHERS_WRITE: u32 = 0o022;

#[derive(Debug, thiserror::Error)]
pub enum RunDirError {
    #[error("cannot create the run directory {path}; choose another run_dir")]
    Make {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("cannot use the run directory, because {path} {why}; choose another run_dir, or remove {path}")]
    Unsafe { path: PathBuf, why: &'static str },
    #[error("another supervisor runs in {0}; stop that supervisor, or choose another run_dir")]
    Taken(PathBuf),
}

/// The run directory, locked against a second supervisor.
#[derive(Debug)]
pub struct RunDir {
    path: PathBuf,
    /// The lock, which successive supervisors share. The kernel releases the lock with its last
    /// descriptor. An explicit unlock would release it for all of them.
    lock: File,
}

impl RunDir {
    /// Creates and locks the run directory, or takes over the lock of the previous supervisor.
    pub fn take(path: &Path, inherited: Option<OwnedFd>) -> Result<Self, RunDirError> {
        let private = path.join(PRIVATE);
        own_dir(path, |path| make(path, 0o755))?;
        own_dir(&private, |path| make(path, 0o700))?;
        let taken = |lock: File| {
            lock.try_lock().map_err(|_| RunDirError::Taken(path.to_owned()))?;
            Ok(Self { path: path.to_owned(), lock })
        };
        if let Some(lock) = inherited {
            return taken(File::from(lock));
        }
        taken(open_lock(&private.join(LOCK), true)?)
    }

    /// Returns the reason why a supervisor of this user could not use the directory, without
    /// creating anything. A supervisor that already runs there, even another user's, does not count
    /// as a reason.
    pub fn refuses(path: &Path) -> Option<RunDirError> {
        let refused = examine(path).err()?;
        let socket = path.join(CONTROL_SOCKET);
        let gone = |error: io::Error| error.kind() == io::ErrorKind::ConnectionRefused;
        let is_served = socket.symlink_metadata().is_ok() && !UnixStream::connect(&socket).is_err_and(gone);
        (!is_served).then_some(refused)
    }

    pub fn lock(&self) -> BorrowedFd<'_> {
        self.lock.as_fd()
    }

    /// Returns the path of the file with the state that the configuration does not contain.
    pub fn state(&self) -> PathBuf {
        self.private().join("state.json")
    }

    /// Returns the path of the file that passes the status page's samples to the next supervisor.
    pub fn history(&self) -> PathBuf {
        self.private().join("history")
    }

    /// Returns the path of the socket over which this process passes requests to the next
    /// supervisor.
    pub fn relay(&self) -> PathBuf {
        self.private().join(format!("relay-{}.sock", std::process::id()))
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Creates and returns the folder in which workers of other users can open files whose names
    /// they know.
    pub fn passable(&self) -> Result<PathBuf, RunDirError> {
        let path = self.path.join(PASSABLE);
        own_dir(&path, |path| make(path, 0o711))?;
        Ok(path)
    }

    /// Returns the folder that other users cannot enter.
    pub fn private(&self) -> PathBuf {
        self.path.join(PRIVATE)
    }
}

/// Returns the reason why an existing folder is not safe to use, or `None` if it is safe.
pub fn unsafe_because(path: &Path) -> io::Result<Option<&'static str>> {
    let found = symlink_metadata(path)?;
    let own = found.uid() == geteuid().as_raw();
    Ok(if found.is_symlink() {
        Some("is a link")
    } else if !found.is_dir() {
        Some("is not a folder")
    } else if !own {
        Some("belongs to another user")
    } else if found.mode() & OTHERS_WRITE != 0 {
        Some("is writable by other users")
    } else {
        None
    })
}

fn open_lock(path: &Path, create: bool) -> Result<File, RunDirError> {
    let mut options = OpenOptions::new();
    options.write(true).create(create).truncate(false).custom_flags(OFlag::O_NOFOLLOW.bits()).mode(0o600);
    options.open(path).map_err(|error| match error.raw_os_error() {
        Some(nix::libc::ELOOP) => RunDirError::Unsafe { path: path.to_owned(), why: "is a link" },
        _ => RunDirError::Make { path: path.to_owned(), source: error },
    })
}

/// Makes the checks of [`RunDir::take`], without creating or locking anything.
fn examine(path: &Path) -> Result<(), RunDirError> {
    let private = path.join(PRIVATE);
    own_dir(path, could_be_made)?;
    own_dir(&private, could_be_made)?;
    let lock = private.join(LOCK);
    if lock.symlink_metadata().is_ok() { open_lock(&lock, false).map(drop) } else { Ok(()) }
}

fn could_be_made(path: &Path) -> io::Result<()> {
    let there = path.ancestors().find(|path| path.symlink_metadata().is_ok()).unwrap_or(path);
    Ok(eaccess(there, AccessFlags::W_OK | AccessFlags::X_OK)?)
}

/// Creates a folder with this mode, independent of the umask.
fn make(path: &Path, mode: u32) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(mode).create(path)?;
    set_permissions(path, <Permissions as std::os::unix::fs::PermissionsExt>::from_mode(mode))
}

/// Creates a directory with `make` if it does not exist. An existing directory keeps its mode.
fn own_dir(path: &Path, make: impl FnOnce(&Path) -> io::Result<()>) -> Result<(), RunDirError> {
    let failed = |source| RunDirError::Make { path: path.to_owned(), source };
    match unsafe_because(path) {
        Ok(Some(why)) => Err(RunDirError::Unsafe { path: path.to_owned(), why }),
        Ok(None) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => make(path).map_err(failed),
        Err(error) => Err(failed(error)),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::os::unix::net::UnixListener;

    use shadowslice_shared::errors;

    use super::*;

    fn why(path: &Path) -> String {
        RunDir::take(path, None).unwrap_err().to_string()
    }

    fn full_why(path: &Path) -> String {
        errors::chain(&RunDir::take(path, None).unwrap_err())
    }

    #[test]
    fn a_directory_is_made_taken_once_and_taken_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/run");
        let first = RunDir::take(&path, None).unwrap();
        let mode = |path: &Path| symlink_metadata(path).unwrap().mode() & 0o777;
        assert_eq!((mode(&path), mode(&first.private())), (0o755, 0o700));
        assert!(matches!(RunDir::take(&path, None), Err(RunDirError::Taken(_))));
        drop(first);
        RunDir::take(&path, None).unwrap();
    }

    #[test]
    fn what_others_could_change_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run");
        drop(RunDir::take(&path, None).unwrap());
        for mode in [0o775, 0o757, 0o1777] {
            set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            assert!(why(&path).contains("writable by other users"), "{mode:o}");
        }
        set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
        let link = folder.path().join("link");
        symlink(&path, &link).unwrap();
        assert!(why(&link).contains("is a link"));
        std::fs::write(folder.path().join("file"), "").unwrap();
        assert!(why(&folder.path().join("file")).contains("is not a folder"));
    }

    #[test]
    fn what_a_start_would_refuse_is_known_before_and_nothing_is_made() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/run");
        assert!(RunDir::refuses(&path).is_none() && !folder.path().join("a").try_exists().unwrap());
        let below = |name: &str| folder.path().join(name);
        std::fs::write(below("file"), "").unwrap();
        drop(RunDir::take(&below("open"), None).unwrap());
        set_permissions(below("open"), Permissions::from_mode(0o777)).unwrap();
        drop(RunDir::take(&below("locked"), None).unwrap());
        std::fs::remove_file(below("locked/private/lock")).unwrap();
        symlink(below("file"), below("locked/private/lock")).unwrap();
        for path in [below("file"), below("file/below"), below("open"), below("locked")] {
            assert_eq!(RunDir::refuses(&path).map(|why| errors::chain(&why)), Some(full_why(&path)));
        }
        let served = RunDir::take(&path, None).unwrap();
        assert!(RunDir::refuses(&path).is_none(), "{served:?}");
        // The socket may belong to another user's supervisor.
        let supervisor = UnixListener::bind(below("open").join(CONTROL_SOCKET)).unwrap();
        assert!(RunDir::refuses(&below("open")).is_none());
        drop(supervisor);
        assert!(RunDir::refuses(&below("open")).is_some(), "its socket outlived it");
    }

    #[test]
    fn no_link_leads_to_another_file() {
        let folder = tempfile::tempdir().unwrap();
        let (path, precious) = (folder.path().join("run"), folder.path().join("precious"));
        std::fs::write(&precious, "keep this").unwrap();
        let private = RunDir::take(&path, None).unwrap().private();
        std::fs::remove_file(private.join("lock")).unwrap();
        symlink(&precious, private.join("lock")).unwrap();
        assert!(why(&path).contains("private/lock is a link"));
        std::fs::remove_dir_all(&private).unwrap();
        symlink(folder.path(), &private).unwrap();
        assert!(why(&path).contains("private is a link"));
        assert_eq!(std::fs::read_to_string(&precious).unwrap(), "keep this");
    }
}
