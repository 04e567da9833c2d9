//! The socket on which a worker's boot begins. `ipc-channel` makes it in a folder of its own in the
//! temporary directory, panics where that folder cannot be made, and cuts a path that is too long
//! for a socket, so that one worker finds the socket of another. So the directory is tried first.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use ipc_channel::ipc::IpcOneShotServer;
use shadowslice_shared::boot::WorkerSays;

use super::worker::SpawnError;

/// What a socket's address has room for, without its final zero.
const LONGEST_PATH: usize = 107;

/// What `ipc-channel` calls the socket.
const SOCKET: &str = "socket";

/// Where workers are started from, if a socket can be made there.
pub fn temporary_folder() -> Result<PathBuf, SpawnError> {
    let folder = std::env::temp_dir();
    has_room(&folder)?;
    Ok(folder)
}

pub(super) fn open() -> Result<(IpcOneShotServer<WorkerSays>, String), SpawnError> {
    temporary_folder()?;
    IpcOneShotServer::new().map_err(SpawnError::Channel)
}

/// Whether a folder with a socket in it can be made there. The one that is made is removed at once.
fn has_room(temporary: &Path) -> Result<(), SpawnError> {
    let failed = |source| SpawnError::Temporary { folder: temporary.to_owned(), source };
    // All such folders have names of the same length.
    let made = tempfile::tempdir_in(temporary).map_err(failed)?;
    let socket = made.path().join(SOCKET);
    if socket.to_str().is_none() {
        return Err(failed(io::Error::other("its path is no UTF-8")));
    }
    match socket.as_os_str().as_bytes().len().checked_sub(LONGEST_PATH) {
        None | Some(0) => Ok(()),
        Some(excess) => Err(SpawnError::TemporaryTooLong { folder: PathBuf::from(temporary), excess }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowslice_shared::errors;

    #[test]
    fn a_folder_that_can_be_used_is_left_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        has_room(folder.path()).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_folder_that_is_gone_is_an_error_that_names_it() {
        let gone = tempfile::tempdir().unwrap().path().join("gone");
        let said = errors::chain(&has_room(&gone).unwrap_err());
        assert!(said.contains(&gone.display().to_string()) && said.contains("TMPDIR"), "{said}");
    }

    #[test]
    fn a_path_is_as_long_as_a_socket_allows_and_no_longer() {
        let folder = tempfile::tempdir().unwrap();
        let own = tempfile::tempdir_in(folder.path()).unwrap().path().join(SOCKET).as_os_str().len();
        let of_excess = |excess: usize| {
            let long = folder.path().join("a".repeat(LONGEST_PATH + excess - own - 1));
            std::fs::create_dir(&long).unwrap();
            has_room(&long)
        };
        of_excess(0).unwrap();
        let refused = of_excess(3).unwrap_err();
        assert!(matches!(refused, SpawnError::TemporaryTooLong { excess: 3, .. }), "{refused:?}");
    }
}
