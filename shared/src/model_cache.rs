//! The locks of the cache of optimised models. A worker holds a shared lock on the folder that it
//! uses. To remove a folder, a process needs its exclusive lock.
//!
//! Workers keep the files that they need open, so a removal never breaks a worker. The locks make
//! sure that the folders of running workers are not removed before those of models that have ended.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::fcntl::OFlag;
use nix::sys::statvfs::statvfs;

/// The folder of a model's optimised copies, inside the model's own folder of the cache.
pub const OPTIMISED: &str = "optimised";

/// Opens a folder, but not a link to a folder.
pub fn open_folder(path: &Path) -> io::Result<File> {
    let flags = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW;
    File::options().read(true).custom_flags(flags.bits()).open(path)
}

/// Removes a folder of the cache. Returns false if a worker uses the folder, or if it cannot be
/// removed.
pub fn remove_unused(path: &Path) -> bool {
    let Ok(folder) = open_folder(path) else { return false };
    folder.try_lock().is_ok() && fs::remove_dir_all(path).is_ok()
}

/// Returns the number of bytes that this process can still write to the file system of the path.
/// Returns [`u64::MAX`] if the file system does not report its size.
pub fn free_bytes(path: &Path) -> io::Result<u64> {
    let found = statvfs(path)?;
    if found.blocks() == 0 {
        return Ok(u64::MAX);
    }
    Ok(found.blocks_available().saturating_mul(found.fragment_size()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_in_use_and_the_target_of_a_link_remain() {
        let place = std::env::temp_dir().join(format!("ss-model-cache-{}", std::process::id()));
        let (folder, link) = (place.join("folder"), place.join("link"));
        fs::create_dir_all(folder.join("form")).unwrap();
        std::os::unix::fs::symlink(&folder, &link).unwrap();
        assert!(!remove_unused(&link) && link.is_symlink());
        let used = open_folder(&folder).unwrap();
        used.try_lock_shared().unwrap();
        assert!(!remove_unused(&folder) && folder.is_dir());
        drop(used);
        assert!(remove_unused(&folder) && !folder.try_exists().unwrap());
        assert!(!remove_unused(&folder), "nothing is there");
        fs::remove_dir_all(place).unwrap();
    }
}
